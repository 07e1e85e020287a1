"""Programs as JAX hands them to the TPUs' compiler, as text, and what that makes of them."""

from collections.abc import Callable

import torch
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from torch import nn

import spmdzero
from spmdzero.backend import tracing_only
from spmdzero.engine import StepGraph
from tests.support.engines import config


def as_text(module: bytes) -> str:
    """The text of a program's StableHLO."""
    with mlir.make_ir_context():
        return str(ir.Module.parse(module))


def step_for_tpus(engine: spmdzero.Engine, batch: torch.Tensor) -> str:
    """The program of a step, which isn't run."""
    found: list[bytes | None] = []

    def read(graph: StepGraph) -> None:
        found.append(graph.annotated())

    with tracing_only(platform="TPU"), engine.observe(read):
        engine.train_batch(batch)
    assert found[0] is not None
    return as_text(found[0])


def cycles_on_v5e(model: Callable[[], nn.Module], *row: int) -> int:
    """What libtpu expects of a step in bf16, of 8 rows `[*row]` for each of 8 chips."""
    told = config(train_micro_batch_size_per_gpu=8, bf16={"enabled": True})
    with torch.device("meta"):
        batch = torch.empty(64, *row, dtype=torch.bfloat16)
        made = model()
    return spmdzero.explain(made, told, batch, tpu=["v5e:2x4"], stages=()).time_on("v5e:2x4").cycles
