"""States in host memory as the TPU's compiler makes a step of them."""

import collections
import importlib.util
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero import Explanation
from tests.engine.test_stage_3 import ALL, Tied
from tests.explain.test_stage_3_on_tpu import CONFIG, DEVICES, LENGTH, TPU, WIDTH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"),
]
CPU = {"device": "cpu"}


def explained(blocks: int = 2, spmd: Any = None, **zero: object) -> Explanation:
    with torch.device("meta"):
        model = Tied(blocks=blocks, width=WIDTH)
        rows = torch.empty(DEVICES, LENGTH, dtype=torch.long)
    config = CONFIG | {"zero_optimization": zero, "spmd": CONFIG["spmd"] | (spmd or {})}
    return spmdzero.explain(model, config, rows, tpu=[TPU], stages=())


# Stage, and bytes of an element of a shard: a master and two moments of fp32, a parameter of bf16.
@pytest.mark.parametrize(("stage", "size"), [(2, 12), (3, 14)])
def test_what_rests_on_the_host_is_aliased_and_leaves_the_devices_peak(
    stage: int, size: int
) -> None:
    zero = ALL | {"stage": stage}
    plain = explained(**zero)
    offloaded = explained(**zero, offload_optimizer=CPU, offload_param=CPU)
    (before,), (after,) = (e.fit_at(stage).compiled for e in (plain, offloaded))
    moved = offloaded.fit_at(stage).plan.host_total
    assert moved == pytest.approx(size * 2 * 8 * WIDTH * WIDTH / DEVICES, rel=0.05)
    assert after.memory.host_arguments == moved
    # What the program returns there takes the place of what it was given.
    assert after.memory.host_peak == moved
    assert before.memory.host_peak == 0
    assert before.memory.arguments is not None
    assert after.memory.arguments is not None
    assert before.memory.arguments - after.memory.arguments == moved
    # Some of the states are on the devices at a time, beside what the peak has anyway.
    assert before.memory.peak - after.memory.peak > 0.9 * moved
    said = str(offloaded)
    assert "Offloading buys nothing: it fits without" in said
    assert "plan: in host memory" in said
    assert "host memory" not in str(plain)


def test_a_loop_takes_the_shards_of_its_blocks_from_the_host() -> None:
    blocks, loop = 4, {"scan": "on", "reduction": "explicit"}
    plain = explained(blocks, loop, **ALL)
    offloaded = explained(blocks, loop, **ALL, offload_optimizer=CPU, offload_param=CPU)
    (before,), (after,) = (e.fit_at(3).compiled for e in (plain, offloaded))
    moved = offloaded.fit_at(3).plan.host_total
    assert moved == pytest.approx(14 * blocks * 8 * WIDTH * WIDTH / DEVICES, rel=0.05)
    assert after.memory.host_arguments == after.memory.host_peak == moved
    assert before.memory.arguments is not None
    assert after.memory.arguments is not None
    assert before.memory.arguments - after.memory.arguments == moved
    # Each turn gathers a block, as without.
    for found in (plain, offloaded):
        (program,) = found.moves_on(TPU).programs
        looped = [c for c in program.ledger.of_role("parameter") if c.turns == blocks]
        # A stack of matrices has three dims; the wide bias is gathered once.
        assert collections.Counter(len(c.shape) for c in looped) == {3: 4, 2: 1}
    assert before.memory.peak - after.memory.peak > 0.9 * moved
