"""Hosts save their own shards; the run goes on with as many hosts, bit for bit, or with others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from spmdzero.formats import format_of, open_state
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
    return folder, run(2, save=folder, save_after=3, export=folder / "exported")


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


@pytest.mark.parametrize("format_", ["universal", "deepspeed"])
def test_the_first_host_writes_for_deepspeed_what_each_holds(
    saved: tuple[Path, list[float]], format_: str
) -> None:
    native = open_state(saved[0], "global_step3")
    tag = "global_step3_universal" if format_ == "universal" else "global_step3"
    exported = open_state(saved[0] / "exported", tag)
    assert format_of(saved[0] / "exported" / tag) == format_
    shared = native.tensors.keys() & exported.tensors.keys()
    assert {key.partition("/")[0] for key in shared} >= {"parameter", "exp_avg", "exp_avg_sq"}
    for key in shared:
        assert torch.equal(exported.tensors[key].whole(), native.tensors[key].whole()), key


def test_weights_for_others_are_whole_and_a_failure_is_known_to_each_host(
    saved: tuple[Path, list[float]],
) -> None:
    native = open_state(saved[0], "global_step3")
    weights = torch.load(saved[0] / "exported" / "pytorch_model.bin", weights_only=True)
    assert {f"parameter/{name}" for name in weights} <= native.tensors.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, native.tensors[f"parameter/{name}"].whole()), name
    first, second = ((saved[0] / "exported" / f"refused {n}").read_text() for n in range(2))
    assert "can't be written" in first
    assert second == f"the first host could not write: {first}"
