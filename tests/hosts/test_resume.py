"""Hosts save their own shards; the run goes on with as many hosts, bit for bit, or with others."""

from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hosts import run_hosts, told
from tests.hosts.test_training import DEVICES, NEAR

CASE = {"dropout": 0.25, "steps": 9}


def run(hosts: int, **case: Any) -> list[float]:
    """The losses of the case, the same on each host."""
    first, *others = run_hosts(
        "tests.hosts.training", told({"it": CASE | case}), count=hosts, devices=DEVICES // hosts
    )
    assert all(other == first for other in others)
    return first["it"]["losses"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of two hosts after step 3, and their losses, those of later steps too."""
    folder = tmp_path_factory.mktemp("two")
    return folder, run(2, save=folder, save_after=3)


def test_each_host_saves_its_own_shards(saved: tuple[Path, list[float]]) -> None:
    sizes = [path.stat().st_size for path in (saved[0] / "global_step3").glob("tensors-*")]
    assert len(sizes) == 2
    assert max(sizes) < 1.5 * min(sizes)


def test_two_hosts_go_on_bit_for_bit(saved: tuple[Path, list[float]]) -> None:
    folder, losses = saved
    assert run(2, load=folder, first=3) == losses[3:]


def test_a_run_goes_from_two_hosts_to_one_to_four(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, losses = saved
    alone = run(1, load=folder, first=3, save=tmp_path, save_after=6)
    assert alone == pytest.approx(losses[3:], abs=NEAR, rel=0)
    four = run(4, load=tmp_path, first=6)
    assert four == pytest.approx(losses[6:], abs=NEAR, rel=0)
