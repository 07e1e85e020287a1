"""Stage 3 as the TPU's compiler makes it for slices of each generation: traffic, names, memory."""

import collections
import functools
import importlib.util

import pytest

from spmdzero import Explanation
from spmdzero.explain import Topology
from tests.support.processes import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"),
]
FEW, MANY, WIDTH = 4, 16, 1024
# One of the two matrices of a block, in bf16.
MATRIX = 4 * WIDTH * WIDTH * 2
ONE_SLICE = ["v5e:2x4", "v5e:4x4", "v6e:2x4", "v5p:2x2x2", "v5p:4x4x4"]
SCRIPT = """
import sys
import torch
import spmdzero
from tests.engine.test_stage_3 import Tied

tpu, devices, blocks, width, scan, flags = sys.argv[1:]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    # Vectors stay whole. One of which a chip has fewer than 128 elements libtpu gathers by a sum.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 5000},
    "spmd": {"scan": scan, "xla_flags": flags},
}
with torch.device("meta"):
    model = Tied(blocks=int(blocks), width=int(width), words=int(width))
    rows = torch.empty(int(devices), 64, dtype=torch.long)
print(spmdzero.explain(model, config, rows, tpu=[tpu], stages=()).to_json())
"""


@functools.cache
def explained(tpu: str, blocks: int, scan: str, flags: str = "none") -> Explanation:
    devices = Topology.parse(tpu).devices
    told = map(str, (tpu, devices, blocks, WIDTH, scan, flags))
    said = run_python("-c", SCRIPT, *told, devices=devices, SPMDZERO_BACKEND="jax")
    return Explanation.from_json(said[said.index("{") :])


def beside(explanation: Explanation) -> int:
    """Bytes that a device holds at the peak beside the program's inputs."""
    (found,) = explanation.fit_at(3).compiled
    assert found.memory.arguments is not None
    return found.memory.peak - found.memory.arguments


@pytest.mark.parametrize("tpu", ONE_SLICE)
def test_each_parameter_is_gathered_twice_and_scattered_once_by_its_name(tpu: str) -> None:
    found = explained(tpu, FEW, "off")
    moves, time = found.moves_on(tpu), found.time_on(tpu)
    (program,) = moves.programs
    names = [f"blocks.{i}.{part}.weight" for i in range(FEW) for part in ("up", "down")]
    gathers = [c for c in program.ledger.of_role("parameter") if len(c.shape) == 2]
    # The tied table is gathered for the embedding, for the head, and for the head's backward.
    counted = collections.Counter(c.tensor for c in gathers)
    assert counted == dict.fromkeys(names, 2) | {"embed.weight": 3}
    assert {(c.kind, c.dtype) for c in gathers} == {("all-gather", "bf16")}
    assert {c.bytes for c in gathers} == {MATRIX, MATRIX // 4}
    scattered: collections.Counter[str] = collections.Counter()
    for c in program.ledger.of_role("gradient"):
        scattered[c.tensor] += c.wire_bytes if c.kind == "reduce-scatter" else 0
    # Over one direction of a slice after another libtpu pads some of them by a few rows.
    parts = (gathers[0].group_size - 1) / gathers[0].group_size
    for name in names:
        assert MATRIX * parts <= scattered[name] < 1.05 * MATRIX * parts
    # Gathers run beside compute, and a part of the wire is left for which the chip waits.
    assert sum(c.asynchronous for c in gathers) >= len(gathers) / 2
    assert 0 < time.exposed < time.wire


@pytest.mark.parametrize("tpu", ONE_SLICE)
@pytest.mark.parametrize("scan", ["off", "on"])
def test_a_step_sends_three_times_what_a_device_lacks_of_the_parameters(
    tpu: str, scan: str
) -> None:
    # Without its flags libtpu sums matrices this small whole on v6e, in a loop. Elsewhere they only
    # double its time.
    found = explained(tpu, FEW, scan, "auto" if tpu.startswith("v6e") else "none")
    moves = found.moves_on(tpu)
    assert (moves.activations, moves.unnamed) == ((), ())
    # The floor has two gathers of the tied table, of which there are three.
    table, blocks = WIDTH * WIDTH, FEW * 8 * WIDTH * WIDTH
    least = 1 + table / (3 * (table + blocks))
    assert 0.999 * least < moves.over_floor < 1.03 * least


@pytest.mark.parametrize(("tpu", "scan"), [("v6e:2x4", "off"), ("v5e:4x4", "on")])
def test_what_is_held_at_the_peak_grows_with_depth_by_no_whole_parameter(
    tpu: str, scan: str
) -> None:
    few, many = (beside(explained(tpu, blocks, scan)) for blocks in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < MATRIX / 2
