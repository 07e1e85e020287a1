"""The state as DTensors: torch.distributed.checkpoint moves it from mesh to mesh, and to torch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdzero.utils import safe_get_full_optimizer_state
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate

import spmdzero
from spmdzero.backend import runtime
from spmdzero.errors import SpmdZeroUsageError
from tests.hosts.hosts import run_hosts
from tests.support.processes import run_python

# torch warns about its own code, and about what one process does alone, which is meant.
pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is:UserWarning", "ignore:torch.distributed is:UserWarning"
)
ROWS = 8


class Net(nn.Module):
    """A tied weight, one that 8 devices have flattened, a buffer, small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
        self.odd = nn.Parameter(torch.randn(13, 7))
        self.again = nn.Linear(16, 64)
        self.again.weight = self.first.weight
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh() + self.again(x)
        return (self.last(hidden).square().mean() + self.odd.square().mean()).float()


def started(stage: int, **more: Any) -> Any:
    config = {
        "train_batch_size": ROWS,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "spmd": {"min_shard_elements": 64},
        **more,
    }
    return spmdzero.initialize(model=Net(), config=config)[0]


def trained(engine: Any, *steps: int) -> list[float]:
    dtype = next(engine.module.parameters()).dtype
    found = []
    for step in steps:
        x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        own = x.chunk(runtime.process_count())[runtime.process_index()]
        found.append(engine.train_batch(iter([(own,)])).item())
    return found


def test_another_mesh_and_stage_has_the_same_weights_and_goes_on(tmp_path: Path) -> None:
    engine = started(3, bf16={"enabled": True})
    trained(engine, 0, 1)
    state = engine.distributed_state()
    assert isinstance(state, Stateful)
    dcp.save({"engine": state}, checkpoint_id=tmp_path)
    values = state.state_dict()
    moment = values["optim"]["state"]["first.weight"]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == (Replicate(),)
    assert moment.device_mesh.size() == 1
    after = trained(engine, 2, 3)
    printed = run_python("-m", "tests.interchange.test_distributed_state", str(tmp_path), devices=4)
    seen = json.loads(printed.splitlines()[-1])
    assert seen["steps"] == 2
    assert seen["lr"] != seen["lr before"]
    assert seen["mesh"] == 4
    weights = {name: value.to_local().double() for name, value in values["model"].items()}
    assert seen["weights"] == {name: value.tolist() for name, value in weights.items()}
    assert seen["moment"] == moment.to_local().tolist()
    # The mean of 8 rows is one of other parts on 4 devices: a digit of bf16's 3.
    assert seen["losses"] == pytest.approx(after, rel=2**-7)


def test_torch_reads_the_weights_of_a_plain_model(tmp_path: Path) -> None:
    engine = started(2)
    trained(engine, 0)
    dcp.save(engine.distributed_state().state_dict(), checkpoint_id=tmp_path / "saved")
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    model = Net()
    read = torch.load(tmp_path / "whole.pt", weights_only=True)
    model.load_state_dict(read["model"])
    own = engine.module.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name].cpu()), name
    assert {states["step"].item() for states in read["optim"]["state"].values()} == {1.0}
    # And what torch alone has saved is read back, into a model whose optimizer starts anew.
    with torch.no_grad():
        model.last.bias.fill_(3.0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torch's", no_dist=True)
    state = engine.distributed_state()
    content = {"model": state.state_dict()["model"]}
    dcp.load(content, checkpoint_id=tmp_path / "torch's")
    state.load_state_dict(content)
    assert torch.equal(engine.module.last.bias.detach().cpu(), torch.full((16,), 3.0))


def test_gradients_that_wait_are_refused() -> None:
    engine = started(2, gradient_accumulation_steps=2, train_batch_size=2 * ROWS)
    engine.backward(engine(torch.ones(ROWS, 16)))
    engine.step()
    with pytest.raises(SpmdZeroUsageError, match="in the middle of gradient accumulation"):
        engine.distributed_state().state_dict()


@pytest.mark.slow
def test_each_of_two_hosts_writes_its_own_part_and_one_process_reads_all(tmp_path: Path) -> None:
    told = ("tests.interchange.test_distributed_state", str(tmp_path), "hosts")
    both = run_hosts(*told, count=2, devices=4)
    assert both[0] == both[1]
    seen = both[0]
    assert seen["placements"] == {
        "first.weight": "(Shard(dim=0),)", "last.weight": "(Shard(dim=1),)",
        "first.bias": "(Shard(dim=0),)", "odd": "(Replicate(),)",
    }  # fmt: skip
    assert seen["local"] == [32, 16]
    sizes = [sum(f.stat().st_size for f in tmp_path.glob(f"__{rank}_*.distcp")) for rank in (0, 1)]
    # Each has half of the weights and states.
    assert min(sizes) > 0.3 * sum(sizes)
    engine = started(2, bf16={"enabled": True})
    dcp.load({"engine": engine.distributed_state()}, checkpoint_id=tmp_path)
    assert engine.global_steps == 2
    losses = trained(engine, 2, 3)
    assert losses == pytest.approx(seen["losses"], rel=2**-7)
    assert losses == pytest.approx(seen["loaded"], rel=2**-7)


def on_hosts(folder: str) -> None:
    """Saves at stage 3 and loads at stage 1, with the rows of this host."""
    engine = started(3, bf16={"enabled": True})
    trained(engine, 0, 1)
    state = engine.distributed_state()
    dcp.save({"engine": state}, checkpoint_id=folder)
    model = state.state_dict()["model"]
    names = ("first.weight", "last.weight", "first.bias", "odd")
    seen = {
        "placements": {name: str(model[name].placements) for name in names},
        "local": list(model["first.weight"].to_local().shape),
    }
    other = started(1, bf16={"enabled": True})
    dcp.load({"engine": other.distributed_state()}, checkpoint_id=folder)
    print(json.dumps(seen | {"losses": trained(engine, 2, 3), "loaded": trained(other, 2, 3)}))


def main(folder: str) -> None:
    engine = started(1, bf16={"enabled": True})
    before = engine.get_lr()
    dcp.load({"engine": engine.distributed_state()}, checkpoint_id=folder)
    weights = {name: t.detach().cpu().double().tolist()
               for name, t in engine.module.state_dict().items()}  # fmt: skip
    moment = safe_get_full_optimizer_state(engine.module.first.weight, "exp_avg").cpu()
    seen = {"steps": engine.global_steps, "lr": engine.get_lr(), "lr before": before,
            "mesh": engine.mesh.size, "weights": weights, "moment": moment.tolist()}  # fmt: skip
    print(json.dumps(seen | {"losses": trained(engine, 2, 3)}))


if __name__ == "__main__":
    on_hosts(sys.argv[1]) if sys.argv[2:] else main(sys.argv[1])
