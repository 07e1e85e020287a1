"""What each device really holds, read from the live shards."""

import math
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.plan import Role
from tests.support.contract import make_batch, make_model

DEVICES = 8


def config(stage: int, *, bf16: bool = True, gas: int = 2, **spmd: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "spmd": spmd,
    }


def train(engine: spmdzero.Engine, steps: int) -> None:
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*make_batch(step, micro)))
            engine.step()


@pytest.fixture(scope="module", params=[0, 1, 2])
def trained(request: pytest.FixtureRequest) -> spmdzero.Engine:
    engine, *_ = spmdzero.initialize(model=make_model(), config=config(request.param))
    train(engine, 10)
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


def test_a_tensor_that_no_dim_divides_is_padded_and_still_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 67), torch.nn.ReLU(), torch.nn.Linear(67, 1))
    engine, optimizer, *_ = spmdzero.initialize(
        model=model, config=config(2, bf16=False, gas=1, min_shard_elements=64)
    )
    reference = torch.nn.Sequential(
        torch.nn.Linear(33, 67), torch.nn.ReLU(), torch.nn.Linear(67, 1)
    )
    reference.load_state_dict({k: v.cpu() for k, v in engine.module.state_dict().items()})
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        x = torch.randn(DEVICES, 33, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        loss = reference(x).pow(2).mean()
        other.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        other.step()
    weight = engine.module[0].weight
    moments = spmdzero.local_shards(optimizer.state[weight]["exp_avg"])
    assert {tuple(shard.shape) for shard in moments} == {(math.ceil(33 * 67 / DEVICES),)}
    for ours, theirs in zip(engine.module.parameters(), reference.parameters(), strict=True):
        # Adam divides by the root of a mean square: rounding of 1e-7 grows where that is small.
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-6)


def test_a_global_forward_has_no_partial_and_shards_stage_1_too() -> None:
    engine, *_ = spmdzero.initialize(model=make_model(), config=config(1, forward="global"))
    train(engine, 1)
    shards = spmdzero.local_shards(engine.named_tensors()["accumulator/wte.weight"])
    assert {shard.numel() for shard in shards} == {128 * 64 // DEVICES}
