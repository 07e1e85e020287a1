"""Biases and norms: what their gradients cost on the wire, by each compiler."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.explain._aot import compile_for_tpu
from spmdzero.explain._chips import Topology
from spmdzero.explain._trace import TracedProgram, trace_step
from spmdzero.inspect import CollectiveLedger

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
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = spmdzero.initialize(model=Blocks(), config=config)
    (program,) = trace_step(engine, torch.ones(8, WIDTH))
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
def test_the_tpus_compiler_sums_all_small_tensors_at_once(program: TracedProgram) -> None:
    made = compile_for_tpu(program.annotated, Topology.parse("v5e:2x4"))
    assert vectors_of_sums(made.hlo) == [SMALL]
