"""Stage 3 with equal blocks as one loop: each turn gathers one block, and reduces its gradients."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import arrays, runtime
from spmdzero.inspect import CollectiveLedger, peak_temporary_bytes
from tests.engine.test_offload import CPU, on_host
from tests.engine.test_stage_3 import ALL, Tied, batches, in_each, model, trained
from tests.engine.test_stage_3 import WAYS as EVERY_WAY
from tests.support import engines

BLOCKS, WIDTH = 4, 64
UP = "parameter/blocks.0.up.weight"
# Sums that are called have one order, at stage 2 as in a loop at stage 3.
LOOP: dict[str, Any] = {"scan": "on", "reduction": "explicit"}


def started(stage: int, way: dict[str, Any], of: nn.Module, **more: Any) -> spmdzero.Engine:
    zero = (ALL if stage == 3 else {"stage": stage}) | more
    return engines.start(
        of, **way | {"zero_optimization": zero, "spmd": LOOP | way.get("spmd", {})}
    )


# The ways of stage 3 without loops, but for the clipped one of a width that nothing divides.
WAYS = {way: how for way, how in EVERY_WAY.items() if way != "clipped, padded"}
# Three calls in fp32 are those of groups, below.
QUICK = {("bf16, accumulating", "one call")}


@in_each(WAYS, quick=QUICK)
def test_a_loop_at_stage_3_trains_as_one_at_stage_2(way: str, call: str) -> None:
    more, how = WAYS[way]
    found = []
    for stage in (2, 3):
        engine = started(stage, more, model(blocks=BLOCKS, **how))
        found.append(trained(engine, call, steps=3))
    assert found[1] == found[0]


def test_a_loop_gathers_within_a_group_and_leaves_parts_of_gradients_on_all_devices() -> None:
    grouped = {"mesh": {"data": 2, "fsdp": 4}}
    found = []
    for spmd, more in ((grouped, {}), ({}, {"zero_hpz_partition_size": 4})):
        engine = started(3, {"spmd": spmd}, model(blocks=BLOCKS), **more)
        found.append(trained(engine, "three calls", steps=3)[0])
    assert found[1] == found[0]
    assert {shard.shape[0] for shard in arrays.local_shards(engine.named_tensors()[UP])} == {WIDTH}
    assert engine.plan.at_rest(UP.replace("parameter", "exp_avg")).local == (WIDTH // 2, WIDTH)


@pytest.mark.parametrize(
    "call", [engines.one_call, pytest.param(engines.three_calls, marks=pytest.mark.slow)]
)
def test_a_loop_trains_shards_that_rest_on_the_host_bit_for_bit(call: Any) -> None:
    losses = []
    for more in ({}, {"offload_optimizer": CPU, "offload_param": CPU}):
        engine = started(3, {"bf16": {"enabled": True}}, model(blocks=BLOCKS), **more)
        losses.append([call(engine, batch).item() for batch in batches(4)])
    assert losses[1] == losses[0]
    planned = {name for name in engine.named_tensors() if engine.plan.at_rest(name).on_host}
    assert on_host(engine) == planned
    assert ("parameter/blocks.0.up.weight" in planned) == runtime.host_memory()


def assert_same_at_both_stages(
    of: Callable[[], nn.Module], step: Callable[..., Any], **spmd: Any
) -> None:
    found = []
    for stage in (2, 3):
        engine = started(stage, {"spmd": spmd}, of())
        found.append([step(engine, batch).detach().item() for batch in batches(2)])
    # What is used beside the loop is summed in another order than in it.
    assert found[1] == pytest.approx(found[0], rel=2e-6)


class Penalised(Tied):
    """Its forward reads the weights of its blocks beside the loop too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().mean() for p in self.blocks.parameters())
        return super().forward(x) + penalty


def test_a_weight_that_is_used_beside_the_loop_has_both_gradients() -> None:
    def penalised() -> nn.Module:
        torch.manual_seed(0)
        return Penalised(blocks=BLOCKS)

    assert_same_at_both_stages(penalised, engines.three_calls)


@pytest.mark.slow
def test_gradients_of_a_loops_weights_can_be_asked_for_and_differentiated() -> None:
    def step(engine: spmdzero.Engine, batch: torch.Tensor) -> torch.Tensor:
        weights = [engine.module.blocks[1].up.weight, engine.module.embed.weight]
        (first, _) = torch.autograd.grad(engine(batch), weights)
        loss = engine(batch)
        (second, table) = torch.autograd.grad(loss, weights, create_graph=True)
        assert torch.allclose(first.cpu(), second.detach().cpu(), rtol=1e-5, atol=1e-7)
        loss = loss + second.square().sum() + table.square().sum()
        engine.backward(loss)
        engine.step()
        return loss

    assert_same_at_both_stages(lambda: model(blocks=BLOCKS), step, capture=False)


def test_frozen_blocks_are_gathered_in_the_loop_and_have_no_gradient() -> None:
    lora = model(blocks=BLOCKS)
    for name, parameter in lora.named_parameters():
        parameter.requires_grad_("norm" in name)
    engine = started(3, {}, lora)
    with spmdzero.record_ledgers(engine) as ledgers:
        engines.one_call(engine, *batches(1))
    looped = [c for c in ledgers.boundary.collectives if c.in_loop]
    assert collections.Counter((c.role, c.kind) for c in looped) == {("parameter", "all-gather"): 4}
    with torch.no_grad():
        engine.eval()
        assert torch.isfinite(engine(batches(1)[0]))


def programs_of(blocks: int, *, width: int = WIDTH, **more: Any) -> list[str]:
    engine = started(3, more, model(blocks=blocks, width=width))
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        engines.one_call(engine, batches(1, length=4)[0])
    return texts


def test_each_turn_gathers_a_block_and_reduces_its_gradients() -> None:
    (text,) = programs_of(BLOCKS)
    ledger = CollectiveLedger.from_hlo(text)
    weights = [f"blocks.*.{name}.weight" for name in ("up", "down")]
    looped = [c for c in ledger.collectives if c.turns > 1]
    assert {c.turns for c in looped} == {BLOCKS}
    counted = collections.Counter((c.role, c.tensor, c.kind) for c in looped)
    gathers = {("parameter", name, "all-gather"): 2 for name in weights}
    assert counted == gathers | {("gradient", name, "reduce-scatter"): 1 for name in weights}
    # Beside the loops the tied table is: for the embedding, the head, and the head's backward.
    beside = [c for c in ledger.of_role("parameter") if c.turns == 1]
    assert [c.tensor for c in beside] == ["embed.weight"] * 3
    assert ledger.activations == ()


@pytest.mark.slow
def test_what_a_device_holds_beside_shards_does_not_grow_with_the_blocks() -> None:
    wide, few, many = 256, 4, 16
    temporary = [peak_temporary_bytes(*programs_of(count, width=wide)) for count in (few, many)]
    whole = 2 * 4 * wide * wide * 4
    # A block's shards are stacked for the loop, and its gradients' too, which wait for the norm.
    # Its activations are a tenth of one.
    shards = 3.5 * whole / 8
    assert (temporary[1] - temporary[0]) / (many - few) < shards
