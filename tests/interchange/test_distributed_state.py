"""The state as DTensors: torch.distributed.checkpoint moves it from mesh to mesh, and to torch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdzero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, distribute_module

import spmdzero
from spmdzero.backend import current, runtime
from spmdzero.errors import SpmdZeroUsageError
from tests.hosts.hosts import run_hosts
from tests.support.processes import run_python

# torch warns about its own code, and about what one process does alone, which is meant.
pytestmark = [
    pytest.mark.backends("torch_xla", test_all="jax"),
    pytest.mark.filterwarnings(
        "ignore:TypedStorage is:UserWarning", "ignore:torch.distributed is:UserWarning"
    ),
]
ROWS = 8
# Each weight of a mesh 4 x 2 has a part on each device, where the backend has the second axis.
SPLIT: dict[str, Any] = {
    "mesh": {"fsdp": 4, "tensor": 2},
    "partition": {"first.*": "column", "again.*": "column", "last.weight": "row"},
}
if current().name != "jax":
    SPLIT = {}


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


def started(stage: int, spmd: dict[str, Any] | None = None, **more: Any) -> Any:
    config = {
        "train_batch_size": ROWS,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "spmd": {"min_shard_elements": 64, **(spmd or {})},
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
    engine = started(3, SPLIT, bf16={"enabled": True})
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
    # torch's own way into a module takes the DTensors, and the fp32 masters follow.
    set_model_state_dict(engine.module, values["model"])
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach().cpu(), values["model"][name].to_local()), name
        master = values["model"][name].to_local().float()
        assert torch.equal(safe_get_full_fp32_param(parameter).cpu(), master), name
    set_optimizer_state_dict(engine.module, engine.optimizer, values["optim"])
    for name, states in values["optim"]["state"].items():
        found = safe_get_full_optimizer_state(engine.module.get_parameter(name), "exp_avg")
        assert torch.equal(found.cpu(), states["exp_avg"].to_local()), name
    safe_set_full_fp32_param(engine.module.odd, values["optim"]["state"]["odd"]["master"])
    found = safe_get_full_fp32_param(engine.module.odd, as_dtensor=True)
    assert torch.equal(found.to_local(), values["optim"]["state"]["odd"]["master"].to_local())


def test_torch_reads_what_the_engine_has(tmp_path: Path) -> None:
    engine = started(2, SPLIT)
    trained(engine, 0)
    dcp.save(engine.distributed_state().state_dict(), checkpoint_id=tmp_path / "saved")
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    model = Net()
    read = torch.load(tmp_path / "whole.pt", weights_only=True)
    model.load_state_dict(read["model"])
    as_dtensors = engine.module_state_dict(prefix="own.", as_dtensor=True)
    for name, own in engine.module.state_dict().items():
        assert torch.equal(model.state_dict()[name], own.cpu()), name
        assert torch.equal(as_dtensors[f"own.{name}"].full_tensor(), own.cpu()), name
    assert as_dtensors.keys() == {f"own.{name}" for name in model.state_dict()}
    for name, parameter in engine.module.named_parameters():
        states = read["optim"]["state"][name]
        assert states["step"].item() == 1.0
        for slot in ("exp_avg", "exp_avg_sq"):
            whole = safe_get_full_optimizer_state(parameter, slot)
            assert torch.equal(states[slot], whole.cpu()), (slot, name)
            found = safe_get_full_optimizer_state(parameter, slot, as_dtensor=True)
            assert isinstance(found, DTensor)
            assert torch.equal(found.full_tensor(), whole.cpu()), (slot, name)
    # torchtitan names the states of an optimizer in one flat dict.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    del model.again
    adam = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), options=flat)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optim": adam}, checkpoint_id=tmp_path / "saved", planner=planner)
    assert torch.equal(
        adam["state.last.weight.exp_avg"], read["optim"]["state"]["last.weight"]["exp_avg"]
    )
    # And what torch alone has saved is read back, into a model whose optimizer starts anew.
    with torch.no_grad():
        model.last.bias.fill_(3.0)
    kept = {"model": model.state_dict() | {"again.weight": model.first.weight}}
    kept["model"] |= {"again.bias": read["model"]["again.bias"]}
    dcp.save(kept, checkpoint_id=tmp_path / "torch's", no_dist=True)
    content = engine.module_state_dict(as_dtensor=True)
    dcp.load({"model": content}, checkpoint_id=tmp_path / "torch's")
    engine.load_module_state_dict({"module": content})
    assert torch.equal(engine.module.last.bias.detach().cpu(), torch.full((16,), 3.0))


def test_in_the_middle_of_accumulation_there_are_weights_and_gradients_only() -> None:
    engine = started(2, SPLIT, gradient_accumulation_steps=2, train_batch_size=2 * ROWS)
    engine.backward(engine(torch.ones(ROWS, 16)))
    engine.step()
    with pytest.raises(SpmdZeroUsageError, match="in the middle of gradient accumulation"):
        engine.distributed_state().state_dict()
    for name, parameter in engine.module.named_parameters():
        found = safe_get_full_grad(parameter, as_dtensor=True)
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), safe_get_full_grad(parameter).cpu()), name
    weight = engine.module_state_dict(as_dtensor=True)["odd"].full_tensor()
    assert torch.equal(weight, engine.module.odd.detach().cpu())
    engine.zero_grad()
    assert safe_get_full_grad(engine.module.odd, as_dtensor=True) is None
    with pytest.raises(SpmdZeroUsageError, match="keep_vars=True"):
        engine.module_state_dict(as_dtensor=True, keep_vars=True)
    with pytest.raises(SpmdZeroUsageError, match="no engine trains this parameter"):
        safe_get_full_grad(nn.Parameter(torch.ones(2)), as_dtensor=True)
    mesh = engine.module_state_dict(as_dtensor=True)["odd"].device_mesh
    with pytest.raises(SpmdZeroUsageError, match=r"odd is a DTensor, as fully_shard"):
        spmdzero.initialize(model=distribute_module(Net(), mesh), config={"train_batch_size": 8})


@pytest.mark.slow
def test_each_of_two_hosts_writes_its_own_part_and_one_process_reads_all(tmp_path: Path) -> None:
    told = ("tests.interchange.test_distributed_state", str(tmp_path), "two")
    both = run_hosts(*told, count=2, devices=4)
    assert both[0] == both[1]
    seen = both[0]
    # Devices of a host have all parts over the tensor axis: first.weight is S(1) T(0).
    assert seen["moments"] == {
        "first.weight": ["(Shard(dim=1),)", [64, 8]], "last.weight": ["(Shard(dim=0),)", [8, 64]],
        "first.bias": ["(Shard(dim=0),)", [32]], "odd": ["(Replicate(),)", [13, 7]],
    }  # fmt: skip
    sizes = [sum(f.stat().st_size for f in tmp_path.glob(f"__{rank}_*.distcp")) for rank in (0, 1)]
    # Each has half of the weights and states.
    assert min(sizes) > 0.3 * sum(sizes)
    engine = started(2, bf16={"enabled": True})
    dcp.load({"engine": engine.distributed_state()}, checkpoint_id=tmp_path)
    assert engine.global_steps == 2
    losses = trained(engine, 2, 3)
    assert losses == pytest.approx(seen["losses"], rel=2**-7)
    assert losses == pytest.approx(seen["loaded"], rel=2**-7)


@pytest.mark.slow
def test_hosts_along_data_have_the_same_part(tmp_path: Path) -> None:
    told = ("tests.interchange.test_distributed_state", str(tmp_path), "four")
    first, *others = run_hosts(*told, count=4, devices=2)
    assert all(other == first for other in others)
    assert first["mesh"] == {"data": 2, "fsdp": 2}
    assert first["moments"] == {
        "first.weight": ["(Replicate(), Shard(dim=0))", [32, 16]],
        "last.weight": ["(Replicate(), Shard(dim=1))", [16, 32]],
        "first.bias": ["(Replicate(), Shard(dim=0))", [32]],
        "odd": ["(Replicate(), Replicate())", [13, 7]],
    }
    assert first["loaded"] == pytest.approx(first["losses"], rel=2**-7)


ON_HOSTS = {"two": SPLIT, "four": {"mesh": {"data": 2, "fsdp": 4}}}


def on_hosts(folder: str, spmd: dict[str, Any]) -> None:
    """Saves at stage 3 and loads at stage 1 and one axis, with the rows of this host."""
    engine = started(3, spmd, bf16={"enabled": True})
    trained(engine, 0, 1)
    state = engine.distributed_state()
    dcp.save({"engine": state}, checkpoint_id=folder)
    content = state.state_dict()
    moments = {}
    for name in ("first.weight", "last.weight", "first.bias", "odd"):
        value, parameter = (
            content["optim"]["state"][name]["exp_avg"],
            engine.module.get_parameter(name),
        )
        moments[name] = [str(value.placements), list(value.to_local().shape)]
        whole = safe_get_full_optimizer_state(parameter, "exp_avg")
        alone = safe_get_full_optimizer_state(parameter, "exp_avg", as_dtensor=True)
        assert alone.placements == value.placements
        assert torch.equal(value.full_tensor(), whole.cpu())
        assert torch.equal(alone.to_local(), value.to_local())
    # What a load has to make whole each host takes part in, also where weights are cut otherwise.
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_module_state_dict({"module": content["model"]})
    weights = engine.module_state_dict(as_dtensor=True)
    assert all(
        torch.equal(v.to_local(), weights[n].to_local()) for n, v in content["model"].items()
    )
    other = started(1, bf16={"enabled": True})
    other.distributed_state().load_state_dict(content)
    mesh = content["model"]["odd"].device_mesh
    seen = {"mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), "moments": moments}
    dcp.load({"engine": engine.distributed_state()}, checkpoint_id=folder)
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
    on_hosts(sys.argv[1], ON_HOSTS[sys.argv[2]]) if sys.argv[2:] else main(sys.argv[1])
