"""Programs as JAX hands them to the TPUs' compiler, as text."""

import torch
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

import spmdzero
from spmdzero.backend import AnnotatedProgram, runtime
from spmdzero.engine import StepGraph


def as_text(module: bytes) -> str:
    """The text of a program's StableHLO."""
    with mlir.make_ir_context():
        return str(ir.Module.parse(module))


def step_for_tpus(engine: spmdzero.Engine, batch: torch.Tensor) -> str:
    """The program of a step, which isn't run."""
    found: list[AnnotatedProgram] = []

    def read(graph: StepGraph) -> None:
        found.append(graph.annotated())

    with runtime.tracing_only(platform="TPU"), engine.observe(read):
        engine.train_batch(batch)
    return as_text(found[0].module)
