"""Traces the programs of one training step."""

import contextlib
import dataclasses
import itertools
from collections import Counter
from typing import Any

from spmdzero.audit import AuditReport, auditing
from spmdzero.backend import Work
from spmdzero.engine import Engine, StepGraph, counting_work
from spmdzero.explain._aot import Compiled, CompilerMemory
from spmdzero.inspect import entry_argument_bytes, peak_temporary_bytes
from spmdzero.profiling import backward_scopes

Batch = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """One of a step's programs.

    Attributes:
        kind: ``"micro"`` or ``"boundary"``, see `StepGraph`.
        runs: number of its runs in one step.
        outputs: names of the tensors that it writes, in order, such as ``"parameter/wte.weight"``.
        annotated: the program before partitioning, for a different compiler; None by a backend
            that has it for none, see `spmdzero.backend.Lowering`.
        compiled: the program as this process's own compiler compiled it; None if it did not.
        work: the model's own arithmetic in one run; None where nobody counted it.
    """

    kind: str
    runs: int
    outputs: tuple[str, ...]
    annotated: bytes | None
    compiled: Compiled | None
    work: Work | None = None


def trace_step(engine: Engine, batch: Batch, *, counts: bool = False) -> tuple[TracedProgram, ...]:
    """Trains one step whose micro-batches are all `batch`; returns its programs.

    Args:
        engine: the engine to train.
        batch: the inputs of one forward: a tensor, a tuple of inputs or a dict of keyword inputs;
            the module returns the loss, as for `Engine.train_batch`.
        counts: whether to count the model's arithmetic, for which each forward is traced twice.
    """
    programs: dict[str, TracedProgram] = {}
    runs: Counter[str] = Counter()

    def read(graph: StepGraph) -> None:
        runs[graph.kind] += 1
        if graph.kind not in programs:
            annotated, text = graph.annotated(), graph.hlo()
            arguments = entry_argument_bytes(text)
            on_host = entry_argument_bytes(text, on_host=True)
            memory = CompilerMemory(
                arguments=arguments,
                peak=arguments + peak_temporary_bytes(text),
                host_arguments=on_host,
                host_peak=on_host + peak_temporary_bytes(text, on_host=True),
            )
            programs[graph.kind] = TracedProgram(
                kind=graph.kind,
                runs=0,
                outputs=graph.returned,
                annotated=annotated,
                compiled=Compiled(hlo=text, memory=memory),
                work=None if count is None else count.take(),
            )
        elif count is not None:
            count.take()

    counting = counting_work() if counts else contextlib.nullcontext()
    with counting as count, engine.observe(read):
        engine.train_batch(itertools.repeat(batch))
    return tuple(
        dataclasses.replace(program, runs=runs[kind]) for kind, program in programs.items()
    )


def trace_audited(
    engine: Engine, batch: Batch, *, steps: int, counts: bool = False
) -> tuple[tuple[TracedProgram, ...], AuditReport]:
    """Runs `trace_step` so, and audits the `steps` steps (1 or more) that it trains.

    Operations of the programs carry the names of the modules that traced them.
    """
    with auditing(engine) as watched, backward_scopes(engine.module):
        programs = trace_step(engine, batch, counts=counts)
        for _ in range(steps - 1):
            engine.train_batch(itertools.repeat(batch))
    return programs, watched.report
