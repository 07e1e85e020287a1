"""The programs of one training step, as they are traced."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from spmdzero.engine import Engine, StepGraph
from spmdzero.explain._aot import Compiled, CompilerMemory
from spmdzero.inspect import entry_argument_bytes, peak_temporary_bytes

Batch = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """One of a step's programs.

    Attributes:
        kind: ``"micro"`` or ``"boundary"``, see `StepGraph`.
        runs: how often it runs in one step.
        annotated: the HLO module proto before partitioning, for another compiler.
        compiled: what this process's own compiler makes of it.
    """

    kind: str
    runs: int
    annotated: bytes
    compiled: Compiled


def trace_step(engine: Engine, batch: Batch) -> tuple[TracedProgram, ...]:
    """Trains one step on `batch`, each micro-batch the same, and keeps its programs.

    Args:
        batch: what one forward takes: a tensor, a tuple of inputs or a dict of keyword inputs;
            the module returns the loss, as `Engine.train_batch` wants it.
    """
    graphs: dict[str, tuple[bytes, str]] = {}
    runs: Counter[str] = Counter()

    def read(graph: StepGraph) -> None:
        runs[graph.kind] += 1
        if graph.kind not in graphs:
            graphs[graph.kind] = graph.annotated(), graph.hlo()

    with engine.observe(read):
        engine.train_batch(_endless(batch))
    return tuple(
        TracedProgram(
            kind=kind, runs=runs[kind], annotated=annotated, compiled=_compiled_here(text)
        )
        for kind, (annotated, text) in graphs.items()
    )


def _endless(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


def _compiled_here(text: str) -> Compiled:
    arguments = entry_argument_bytes(text)
    return Compiled(
        hlo=text,
        memory=CompilerMemory(arguments=arguments, peak=arguments + peak_temporary_bytes(text)),
    )
