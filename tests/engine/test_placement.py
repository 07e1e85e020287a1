"""What each device really holds, read from the live shards."""

from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.config import load_config
from spmdzero.engine._setup import require_shared_folder
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.plan import Role
from tests.support import engines
from tests.support.contract import make_batch, make_model
from tests.support.engines import three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

DEVICES = 8


def start(stage: int, **more: Any) -> spmdzero.Engine:
    usual = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    return engines.start(make_model(), **usual | more)


def train(engine: spmdzero.Engine, steps: int) -> None:
    for step in range(steps):
        three_calls(engine, make_batch(step, 0), make_batch(step, 1))


@pytest.fixture(scope="module", params=[0, 1, 2])
def trained(request: pytest.FixtureRequest) -> spmdzero.Engine:
    engine = start(request.param)
    train(engine, 3)
    return engine


def shards_of(engine: spmdzero.Engine, role: str) -> dict[str, list[torch.Tensor]]:
    return {
        name.split("/", 1)[1]: spmdzero.local_shards(tensor)
        for name, tensor in engine.named_tensors().items()
        if name.startswith(f"{role}/")
    }


def test_parameters_are_whole_and_the_same_on_every_device(trained: spmdzero.Engine) -> None:
    shapes = {n: p.shape for n, p in trained.module.named_parameters()}
    for name, copies in shards_of(trained, "parameter").items():
        assert len(copies) == DEVICES
        for copy in copies:
            assert copy.shape == shapes[name]
            assert torch.equal(copy, copies[0])


@pytest.mark.parametrize("role", ["master", "exp_avg", "exp_avg_sq"])
def test_large_states_are_an_eighth_above_stage_0(trained: spmdzero.Engine, role: str) -> None:
    whole = {n: p.numel() for n, p in trained.module.named_parameters()}
    states = shards_of(trained, role)
    assert states.keys() == whole.keys()
    for name, shards in states.items():
        large = whole[name] >= 2048
        share = DEVICES if trained.plan.stage > 0 and large else 1
        assert [shard.numel() for shard in shards] == [whole[name] // share] * DEVICES
        assert all(shard.dtype == torch.float32 for shard in shards)
        if share > 1:
            # Eight different parts, not eight copies of one.
            assert len({tuple(shard.flatten().tolist()) for shard in shards}) == DEVICES


def test_accumulators_are_partial_before_stage_2_and_shards_at_it(
    trained: spmdzero.Engine,
) -> None:
    whole = {n: p.numel() for n, p in trained.module.named_parameters()}
    for name, shards in shards_of(trained, "accumulator").items():
        sharded = trained.plan.stage == 2 and whole[name] >= 2048
        share = DEVICES if sharded else 1
        assert [shard.numel() for shard in shards] == [whole[name] // share] * DEVICES
        assert all(shard.dtype == torch.bfloat16 for shard in shards)


def test_measured_bytes_are_the_planned_ones(trained: spmdzero.Engine) -> None:
    planned, measured = trained.plan.memory(), spmdzero.measure(trained)
    for role in (Role.PARAMETER, Role.ACCUMULATOR, Role.MASTER, Role.MOMENT):
        assert measured[role] == planned[role] > 0


def test_a_global_forward_has_no_partial_and_shards_stage_1_too() -> None:
    engine = start(1, spmd={"forward": "global"})
    train(engine, 1)
    shards = spmdzero.local_shards(engine.named_tensors()["accumulator/wte.weight"])
    assert {shard.numel() for shard in shards} == {128 * 64 // DEVICES}


class Routes(torch.nn.Module):
    """A bf16 linear layer whose biases of routing are buffers, as in mixtures of experts."""

    _keep_in_fp32_modules_strict = ("router.bias",)

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        self.router = torch.nn.Module()
        for name in ("bias", "scale"):
            self.router.register_buffer(name, torch.ones(4, dtype=torch.bfloat16))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.line(x)
        self.seen.append(made.softmax(-1).dtype)
        return (made + self.router.bias + self.router.scale).float().square().mean()


@pytest.mark.parametrize(
    ("asked", "wide"), [("auto", ["bias"]), (["router.*"], ["bias", "scale"]), ([], [])]
)
def test_buffers_are_kept_in_fp32_by_name(asked: Any, wide: list[str]) -> None:
    named = {"data_types": {"keep_in_fp32_modules": asked}}
    engine = engines.start(Routes(), bf16={"enabled": True}, **named)
    buffers = dict(engine.module.router.named_buffers())
    assert [name for name, kept in buffers.items() if kept.dtype == torch.float32] == wide


def test_autocast_computes_over_bf16_parameters_too() -> None:
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    x = torch.ones(DEVICES, 4, dtype=torch.bfloat16)
    for more, dtype in (({}, torch.bfloat16), (autocast, torch.float32)):
        engine = engines.start(Routes(), bf16={"enabled": True}, **more)
        before = engine.module.line.weight.detach().cpu().clone()
        three_calls(engine, x)
        assert engine.module.seen[0] == dtype
        assert engine.module.line.weight.dtype == torch.bfloat16
        assert not torch.equal(engine.module.line.weight.detach().cpu(), before)


def test_checkpoints_on_each_hosts_own_disk_are_refused_on_several() -> None:
    local = load_config({"checkpoint": {"use_node_local_storage": True}})
    require_shared_folder(local, hosts=1)
    with pytest.raises(SpmdZeroConfigError, match="the 2 hosts write one checkpoint"):
        require_shared_folder(local, hosts=2)
