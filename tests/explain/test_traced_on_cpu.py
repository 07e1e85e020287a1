"""A program for TPUs is traced on CPUs: what XLA's CPU compiler needs in it isn't compiled."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.explain._aot import compile_for_tpu
from spmdzero.explain._chips import Topology
from spmdzero.explain._trace import trace_step

WIDTH = 256


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.linear(x), x)


@pytest.mark.parametrize("bf16", [False, True])
def test_no_gradient_is_divided_by_one_on_a_tpu(mesh: object, bf16: bool) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = spmdzero.initialize(model=Layer(), config=config)
    batch = torch.ones(8, WIDTH, dtype=torch.bfloat16 if bf16 else torch.float32)
    (program,) = trace_step(engine, batch)
    divided = r"zero\.gradient/linear\.weight[^/]*/aten__div"
    assert re.search(divided.encode(), program.annotated.proto)
    made = compile_for_tpu(program.annotated, Topology.parse("v5e:2x4"))
    assert made.hlo is not None
    operations = re.findall(r'op_name="([^"]*)"', made.hlo)
    assert any("zero.gradient/linear.weight" in name for name in operations)
    assert not [name for name in operations if re.search(divided, name)]
