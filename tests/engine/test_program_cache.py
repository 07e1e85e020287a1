"""Programs that torch_xla lets go of, and the memory maps that the others take."""

import json
from typing import Any

import pytest

from tests.engine.program_cache import PROGRAMS
from tests.support.processes import run_module

pytestmark = [pytest.mark.backends("torch_xla"), pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    said = run_module("tests.engine.program_cache", devices=2, XLA_COMPILATION_CACHE_SIZE="")
    return json.loads(said.splitlines()[-1])


def test_a_replay_without_its_program_compiles_it_again_and_changes_no_number(
    found: dict[str, Any],
) -> None:
    traced, replayed, traced_later, replayed_later = found["replays"]
    assert replayed > 0
    assert (traced_later - traced, replayed_later - replayed) == (0, 8)


def test_a_loop_that_compiles_at_each_step_keeps_a_bounded_number_of_maps(
    found: dict[str, Any],
) -> None:
    maps = found["bounded"]
    # Those of the replays' programs are there at first, and larger.
    assert max(maps[PROGRAMS:]) - min(maps[PROGRAMS:]) < (maps[-1] / PROGRAMS)


def test_the_bound_is_not_inherited_by_child_processes(found: dict[str, Any]) -> None:
    assert not found["inherited"]


def test_programs_are_let_go_of_before_the_maps_run_out(found: dict[str, Any]) -> None:
    assert max(found["emptied"]) < found["allowed"]
    assert min(found["emptied"]) < found["allowed"] * 3 // 4
