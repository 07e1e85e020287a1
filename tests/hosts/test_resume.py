"""Hosts save their own shards; the run goes on with as many hosts, bit for bit, or with others."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from spmdzero.formats import format_of, open_state
from tests.hosts.cases import ALL_SHARDS
from tests.hosts.hosts import run_hosts, told
from tests.hosts.test_training import DEVICES, NEAR

CASE = {"dropout": 0.25, "steps": 9}
STAGES: dict[int, dict[str, Any]] = {2: {}, 3: ALL_SHARDS}


def run(hosts: int, stage: int, **case: Any) -> list[float]:
    """The losses of the case, the same on each host."""
    it = CASE | {"config": STAGES[stage]} | case
    first, *others = run_hosts(
        "tests.hosts.training", told({"it": it}), count=hosts, devices=DEVICES // hosts
    )
    assert all(other == first for other in others)
    return first["it"]["losses"]


class Saved(NamedTuple):
    """A checkpoint of two hosts after step 3, and their losses, those of later steps too."""

    stage: int
    folder: Path
    losses: list[float]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("two")
    losses = run(2, request.param, save=folder, save_after=3, export=folder / "exported")
    return Saved(request.param, folder, losses)


def test_each_host_saves_its_own_shards(saved: Saved) -> None:
    sizes = [path.stat().st_size for path in (saved.folder / "global_step3").glob("tensors-*")]
    assert len(sizes) == 2
    assert max(sizes) < 1.5 * min(sizes)


def test_two_hosts_go_on_bit_for_bit(saved: Saved) -> None:
    assert run(2, saved.stage, load=saved.folder, first=3) == saved.losses[3:]


@pytest.mark.slow
def test_a_run_goes_from_two_hosts_to_one_to_four(saved: Saved, tmp_path: Path) -> None:
    stage, folder, losses = saved
    alone = run(1, stage, load=folder, first=3, save=tmp_path, save_after=6)
    assert alone == pytest.approx(losses[3:], abs=NEAR, rel=0)
    four = run(4, stage, load=tmp_path, first=6)
    assert four == pytest.approx(losses[6:], abs=NEAR, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_from_one_host_to_two(stage: int, tmp_path: Path) -> None:
    alone = run(1, stage, save=tmp_path, save_after=3)
    two = run(2, stage, load=tmp_path, first=3)
    assert two == pytest.approx(alone[3:], abs=NEAR, rel=0)


@pytest.mark.parametrize("format_", ["universal", "deepspeed"])
def test_the_first_host_writes_for_deepspeed_what_each_holds(saved: Saved, format_: str) -> None:
    native = open_state(saved.folder, "global_step3")
    tag = "global_step3_universal" if format_ == "universal" else "global_step3"
    exported = open_state(saved.folder / "exported", tag)
    assert format_of(saved.folder / "exported" / tag) == format_
    shared = native.tensors.keys() & exported.tensors.keys()
    assert {key.partition("/")[0] for key in shared} >= {"parameter", "exp_avg", "exp_avg_sq"}
    for key in shared:
        assert torch.equal(exported.tensors[key].whole(), native.tensors[key].whole()), key


@pytest.mark.filterwarnings("ignore:TypedStorage is:UserWarning")
def test_torch_reads_whole_tensors_of_which_each_host_wrote_its_part(
    saved: Saved, tmp_path: Path
) -> None:
    written = saved.folder / "exported" / "torch's"
    saved_as = FileSystemReader(written).read_metadata().state_dict_metadata
    for name in ("model.wide.weight", "optim.state.wide.weight.exp_avg"):
        assert [list(chunk.sizes) for chunk in saved_as[name].chunks] == [[32, 24]] * 2, name
    dcp_to_torch_save(written, tmp_path / "whole.pt")
    read = torch.load(tmp_path / "whole.pt", weights_only=True)
    native = open_state(saved.folder, "global_step3")
    for key, tensor in native.tensors.items():
        role, _, name = key.partition("/")
        of_name = read["optim"]["state"].get(name, {})
        found = read["model"][name] if role in ("parameter", "buffer") else of_name[role]
        assert torch.equal(found, tensor.whole()), key


def test_weights_for_others_are_whole_and_a_failure_is_known_to_each_host(
    saved: Saved,
) -> None:
    native = open_state(saved.folder, "global_step3")
    weights = torch.load(saved.folder / "exported" / "pytorch_model.bin", weights_only=True)
    assert {f"parameter/{name}" for name in weights} <= native.tensors.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, native.tensors[f"parameter/{name}"].whole()), name
    first, second = ((saved.folder / "exported" / f"refused {n}").read_text() for n in range(2))
    assert "can't be written" in first
    assert second == f"the first host could not write: {first}"
