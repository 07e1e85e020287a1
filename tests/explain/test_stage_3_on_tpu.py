"""Stage 3 as the TPU's compiler makes it: where parameters are, and what is gathered when."""

import collections
import functools
import importlib.util
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero import Explanation
from tests.engine.test_stage_3 import ALL, WORDS, Tied

pytestmark = pytest.mark.backends("jax")

WIDTH, LENGTH, DEVICES, TPU = 1024, 64, 8, "v5e:2x4"
# Of the two matrices of a block, in bf16.
BLOCK = 2 * 4 * WIDTH * WIDTH * 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": ALL,
    # The flags that hide the wire double the compiler's time, and gather no more often.
    "spmd": {"xla_flags": "none"},
}


@functools.cache
def explained(blocks: int) -> Explanation:
    with torch.device("meta"):
        model = Tied(blocks=blocks, width=WIDTH)
        rows = torch.empty(DEVICES, LENGTH, dtype=torch.long)
    return spmdzero.explain(model, CONFIG, rows, tpu=[TPU], stages=())


def sizes(blocks: int) -> tuple[int, int]:
    """Bytes of the arguments, and of what there is beside them at the peak."""
    (found,) = explained(blocks).fit_at(3).compiled
    assert found.memory.arguments is not None
    return found.memory.arguments, found.memory.peak - found.memory.arguments


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
def test_the_tpus_compiler_gathers_bf16_twice_and_keeps_an_eighth_whatever_the_depth() -> None:
    blocks = 4
    (program,) = explained(blocks).moves_on(TPU).programs
    gathers = [c for c in program.ledger.of_role("parameter") if len(c.shape) == 2]
    # By shape; tests/jax_backend/test_stage_3_on_slices.py has them by name.
    counted = collections.Counter(c.shape for c in gathers)
    # The tied table is gathered for the embedding, for the head, and for the head's backward.
    up, down, table = (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WORDS, WIDTH)
    assert counted == {up: 2 * blocks, down: 2 * blocks, table: 3}
    assert {(c.kind, c.dtype) for c in gathers} == {("all-gather", "bf16")}
    assert any(c.asynchronous for c in gathers)
    assert explained(blocks).audit.findings == ()

    (arguments, beside), (_, beside_fewer) = sizes(blocks), sizes(blocks // 2)
    # A parameter is 2 bytes, its master and moments 12; what is small stays whole.
    whole = blocks * BLOCK + 2 * WORDS * WIDTH
    assert arguments == pytest.approx(7 * whole / DEVICES, rel=0.05)
    grown = (beside - beside_fewer) / (blocks - blocks // 2)
    # What each block more adds is its gradients' shards and activations, not its gathered weights.
    assert BLOCK / DEVICES <= grown < BLOCK / 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
def test_a_loop_sends_the_floor_and_holds_the_shards_of_each_further_block() -> None:
    few, many = 4, 16
    beside: list[int] = []
    for blocks in (few, many):
        with torch.device("meta"):
            model = Tied(blocks=blocks, width=WIDTH)
            rows = torch.empty(DEVICES, LENGTH, dtype=torch.long)
        config = CONFIG | {"spmd": CONFIG["spmd"] | {"scan": "on"}}
        found = spmdzero.explain(model, config, rows, tpu=[TPU], stages=())
        moves, (compiled,) = found.moves_on(TPU), found.fit_at(3).compiled
        looped = [c for p in moves.programs for c in p.ledger.collectives if c.in_loop]
        matrices = collections.Counter((c.role, c.kind) for c in looped if c.bytes == BLOCK // 2)
        gathers, scatters = ("parameter", "all-gather"), ("gradient", "reduce-scatter")
        assert matrices == {gathers: 4, scatters: 2}
        assert {c.turns for c in looped} == {blocks}
        # The tied table is gathered three times where the floor has two.
        assert moves.over_floor == pytest.approx(1, abs=0.01)
        assert compiled.memory.arguments is not None
        beside.append(compiled.memory.peak - compiled.memory.arguments)
    # A block's shards, stacked, those of its gradients, and its activations.
    assert (beside[1] - beside[0]) / (many - few) < 3 * BLOCK / DEVICES
