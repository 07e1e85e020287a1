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

tpu, devices, blocks, width, scan, flags, group = sys.argv[1:]
zero = {"stage": 3, "zero_hpz_partition_size": int(group)}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    # Vectors stay whole. One of which a chip has fewer than 128 elements libtpu gathers by a sum.
    "zero_optimization": zero | {"stage3_param_persistence_threshold": 5000},
    "spmd": {"scan": scan, "xla_flags": flags},
}
with torch.device("meta"):
    model = Tied(blocks=int(blocks), width=int(width), words=int(width))
    rows = torch.empty(int(devices), 64, dtype=torch.long)
print(spmdzero.explain(model, config, rows, tpu=[tpu], stages=()).to_json())
"""


@functools.cache
def explained(tpu: str, blocks: int, scan: str, flags: str = "none", group: int = 1) -> Explanation:
    devices = Topology.parse(tpu).devices
    told = map(str, (tpu, devices, blocks, WIDTH, scan, flags, group))
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


@pytest.mark.parametrize(
    ("tpu", "scan"),
    [("v6e:2x4", "off"), ("v5e:4x4", "on"), ("v5p:2x2x2", "off"), ("v6e:2x4", "on")],
)
def test_what_is_held_at_the_peak_grows_with_depth_by_no_whole_parameter(
    tpu: str, scan: str
) -> None:
    few, many = (beside(explained(tpu, blocks, scan)) for blocks in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < MATRIX / 2


TWO_SLICES = "2xv5e:2x4"


def named(scan: str) -> dict[str, int]:
    """The matrices by name, each with the number of its gathers: the tied table has three."""
    blocks = ["*"] if scan == "on" else range(FEW)
    weights = [f"blocks.{i}.{part}.weight" for i in blocks for part in ("up", "down")]
    return dict.fromkeys(weights, 2) | {"embed.weight": 3}


@pytest.mark.parametrize("scan", ["off", "on"])
def test_over_two_slices_each_gather_has_a_name_and_gradients_are_summed_whole(scan: str) -> None:
    moves = explained(TWO_SLICES, FEW, scan).moves_on(TWO_SLICES)
    (program,) = moves.programs
    assert (moves.activations, moves.unnamed) == ((), ())
    gathers = [c for c in program.ledger.of_role("parameter") if c.bytes > 2**16]
    assert collections.Counter(c.tensor for c in gathers) == named(scan)
    # Each is within a slice, of what all slices' places have sent each other.
    assert {(c.kind, c.group_size) for c in gathers} == {("all-gather", 8)}
    # libtpu has no sum of which each chip of both slices keeps its part: two gathers and an
    # all-reduce within a slice are 4 * 7/8 of what there is, and the floor is 3 * 15/16.
    assert 1.24 < moves.over_floor < 1.26


@pytest.mark.parametrize("scan", ["off", "on"])
def test_groups_that_are_slices_gather_and_scatter_within_them_once(scan: str) -> None:
    moves = explained(TWO_SLICES, FEW, scan, group=8).moves_on(TWO_SLICES)
    (program,) = moves.programs
    assert (moves.activations, moves.unnamed) == ((), ())
    gathers = [c for c in program.ledger.of_role("parameter") if c.bytes > 2**16]
    assert collections.Counter(c.tensor for c in gathers) == named(scan)
    gradients = [c for c in program.ledger.of_role("gradient") if c.bytes > 2**16]
    assert {c.kind for c in gradients} == {"reduce-scatter"}
    assert {c.tensor for c in gradients} == named(scan).keys()
    # The floor has what one sum and one gather between slices send, which the ledger hasn't.
    assert 0.95 < moves.over_floor < 1
