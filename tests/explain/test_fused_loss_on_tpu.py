"""What the TPU's compiler makes of the fused loss."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmdzero.backend import tracing_only
from spmdzero.explain import Topology, compile_for_tpu
from spmdzero.explain._aot import Compiled
from spmdzero.explain._trace import trace_step
from spmdzero.nn import linear_cross_entropy
from tests.audit.models import config, engine_of

pytestmark = pytest.mark.backends("jax")

WIDTH, VOCABULARY, ROWS = 256, 8192, 1024


class Head(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.fused = fused

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, labels = self.token(tokens).flatten(0, 1), labels.flatten()
        if self.fused:
            return linear_cross_entropy(hidden, self.head.weight, labels)
        return F.cross_entropy(self.head(hidden).float(), labels)


def compiled(*, fused: bool) -> Compiled:
    engine = engine_of(Head(fused=fused), config(bf16={"enabled": True}))
    rows = torch.zeros(8, ROWS, dtype=torch.int64)
    with tracing_only(platform="TPU"):
        (program,) = trace_step(engine, (rows, rows))
    return compile_for_tpu(program.annotated, Topology.parse("v5e:2x4"))


def cycles(made: Compiled) -> int:
    found = re.findall(r'estimated_cycles":"(\d+)"', made.hlo or "")
    assert found
    return sum(map(int, found))


@pytest.mark.slow
def test_it_takes_fewer_cycles_and_less_memory_and_holds_no_logits() -> None:
    fused, plain = compiled(fused=True), compiled(fused=False)
    whole = re.compile(rf"\[(?:{ROWS},{VOCABULARY}|{VOCABULARY},{ROWS})\]")
    assert whole.search(plain.hlo or "")
    assert not whole.search(fused.hlo or "")
    assert cycles(fused) < 0.8 * cycles(plain)
    # The logits are half as large, and the gradient by them isn't written at all: 24 MB of 32. The
    # sum of the weight's gradients, in fp32, takes 8.
    assert fused.memory.peak < plain.memory.peak - 8 * 2**20
