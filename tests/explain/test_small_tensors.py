"""What the TPU's compiler makes of gradients that this process traces for its CPUs."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmdzero.explain import Topology, compile_for_tpu
from spmdzero.explain._trace import TracedProgram, trace_step
from spmdzero.inspect import CollectiveLedger
from tests.audit.models import Sound, batches, config, engine_of

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

WIDTH, BLOCKS = 256, 3
# Of a block: weight and bias of the norm, bias of the linear layer.
SMALL = 3 * BLOCKS


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)]
        self.body = nn.Sequential(*(part for pair in pairs for part in pair))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.body(x), x)


@pytest.fixture(scope="module")
def program() -> TracedProgram:
    (program,) = trace_step(engine_of(Blocks(), config()), torch.ones(8, WIDTH))
    return program


def vectors_of_sums(hlo: str) -> list[int]:
    """Of each all-reduce operation that sums vectors of a block, how many."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", hlo)
    counts = (len(re.findall(rf"f32\[{WIDTH}\]", result)) for result in results)
    return [count for count in counts if count]


def test_a_small_tensor_is_summed_once_and_never_gathered(program: TracedProgram) -> None:
    ledger = CollectiveLedger.from_hlo(program.compiled.hlo)
    whole = [c.tensor for c in ledger.of_role("gradient") if not c.scattered]
    assert len(whole) == len(set(whole)) == SMALL
    assert not {c.tensor for c in ledger.of_role("parameter")} & set(whole)
    # XLA's CPU compiler has no pass that combines them.
    assert vectors_of_sums(program.compiled.hlo) == [1] * SMALL


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_the_tpus_compiler_sums_all_small_tensors_at_once(program: TracedProgram) -> None:
    made = compile_for_tpu(program.annotated, Topology.parse("v5e:2x4"))
    assert vectors_of_sums(made.hlo) == [SMALL]


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_no_gradient_is_divided_by_one_on_a_tpu(mesh: object, dtype: torch.dtype) -> None:
    engine = engine_of(Sound(), config(bf16={"enabled": dtype == torch.bfloat16}))
    (program,) = trace_step(engine, batches(1, dtype)[0])
    # XLA's CPU compiler needs it. It is a division in fp32, and what casts for it is there still.
    divided = r"zero\.gradient/a\.weight[^/]*/aten__div(?!/convert)"
    assert program.annotated is not None
    assert re.search(divided.encode(), program.annotated)
    made = compile_for_tpu(program.annotated, Topology.parse("v5e:2x4"))
    assert made.hlo is not None
    operations = re.findall(r'op_name="([^"]*)"', made.hlo)
    assert any("zero.gradient/a.weight" in name for name in operations)
    assert not [name for name in operations if re.search(divided, name)]
