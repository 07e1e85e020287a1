"""The wire of a step on a TPU: in the schedule beside compute, and no more of it than must be.

What is compiled is a step of two wide layers, by libtpu, for chips that are elsewhere.
"""

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.processes import environment
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.backends("jax")

SCRIPT = """
import json, sys
import torch, torch.nn.functional as F
import spmdzero
from spmdzero.explain import Topology
from spmdzero.explain._flags import flags_on
from spmdzero.explain._aot import compile_for_tpu
from spmdzero.explain._twin import on_each_torus, traced_for_tpu
from spmdzero.hlo import each_operation, read_schedule
from spmdzero.inspect import CollectiveLedger

name, flags, reduction = sys.argv[1:]
WIDTH, ROWS = 1024, 512

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
    def forward(self, x):
        return F.mse_loss(self.second(self.first(x.to(torch.bfloat16))), x.to(torch.bfloat16))

topology = Topology.parse(name)
with torch.device("meta"):
    model = Net()
config = {
    "train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    "spmd": {"reduction": reduction, "min_shard_elements": 5000},
}
batch = torch.zeros(topology.devices * ROWS, WIDTH)
traced = on_each_torus([topology], lambda: traced_for_tpu(model, config, batch))
(program,) = traced[name].programs
made = compile_for_tpu(program.annotated, topology, flags=flags_on(topology, flags))
operations = [operation for operation, _ in each_operation(read_schedule(made.hlo))]
open_, beside = {}, []
for operation in operations:
    if operation.asynchronous and operation.wire_bytes:
        open_[operation.name] = 0
    elif operation.ends in open_:
        beside.append(open_.pop(operation.ends))
    else:
        open_ = {start: cycles + (operation.cycles or 0) for start, cycles in open_.items()}
found = CollectiveLedger.from_hlo(made.hlo).collectives
print(json.dumps({
    "beside": beside, "unended": len(open_),
    "moved": [[c.role, c.kind_and_slice, c.wire_bytes, c.asynchronous] for c in found],
    "cycles": sum(operation.cycles or 0 for operation in operations),
}))
"""
# Bytes of the four matrices in bf16.
MATRICES = 4 * 4 * 1024 * 1024 * 2


@functools.cache
def compiled(topology: str, flags: str = "auto", reduction: str = "auto") -> dict[str, Any]:
    devices = 16 if "4x4" in topology else 8
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, topology, flags, reduction], cwd=ROOT,
        env=environment(CPU_NUM_DEVICES=str(devices)), stdout=subprocess.PIPE, text=True,
        timeout=1500, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def sent(found: dict[str, Any], *roles: str, asynchronous: bool = False) -> int:
    return sum(
        size
        for role, _, size, hidden in found["moved"]
        if role in roles and (hidden or not asynchronous)
    )


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_transfers_start_and_end_with_compute_between(topology: str) -> None:
    plain, hidden = compiled(topology, "none"), compiled(topology)
    assert plain["beside"] == []
    # A start for each matrix's reduce-scatter; each ends. Of the gathers at the step's end libtpu
    # starts one before its neighbour's update, and waits for the others.
    # Elsewhere than on v5e no reduce-scatter has compute beside it.
    scatters = 4 if topology.startswith("v5e") else 0
    assert len(hidden["beside"]) >= scatters + 1
    assert hidden["unended"] == 0
    assert min(hidden["beside"]) > 0
    for found in (plain, hidden):
        for role in ("gradient", "parameter"):
            # Each is sent once, with the flags and without; the vectors' sums are under 1 %.
            assert 1 <= sent(found, role) / (MATRICES * 7 / 8) < 1.01
    if scatters:
        assert sent(hidden, "gradient", asynchronous=True) > 0.9 * sent(hidden, "gradient")
    assert sent(hidden, "parameter", asynchronous=True) > 0.2 * sent(hidden, "parameter")
    # What hides the wire doesn't make the chip compute longer: 3 % is what fusions differ by.
    assert hidden["cycles"] < 1.03 * plain["cycles"]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x2"])
def test_where_libtpu_refuses_a_reduce_scatter_one_for_each_direction_sends_no_more(
    topology: str,
) -> None:
    annotated, in_steps = compiled(topology, reduction="annotated"), compiled(topology)
    devices = 16 if "4x4" in topology else 8
    once = MATRICES * (devices - 1) / devices
    large = [row for row in annotated["moved"] if row[0] == "gradient" and row[2] > 1e6]
    assert {row[1] for row in large} == {"all-reduce + slice"}
    assert sent(annotated, "gradient") > 1.99 * once
    large = [row for row in in_steps["moved"] if row[0] == "gradient" and row[2] > 1e5]
    assert {row[1] for row in large} == {"reduce-scatter"}
    assert 1 <= sent(in_steps, "gradient") / once < 1.01
    assert in_steps["unended"] == 0
    assert min(in_steps["beside"]) > 0
