"""Explains the first step of a script's own training loop, of which nothing is computed."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from spmdzero.backend import Batch as PlacedBatch
from spmdzero.backend import Placeholders, found, lowering, on_torus, tracing_only
from spmdzero.engine import Engine, StepGraph, WorkCount, counting_work, engines_made
from spmdzero.explain._aot import require_tpu_compiler
from spmdzero.explain._chips import Topology
from spmdzero.explain._explain import explain_traced
from spmdzero.explain._explanation import Explanation
from spmdzero.explain._trace import TracedProgram
from spmdzero.explain._without_data import traced_program
from spmdzero.profiling import backward_scopes, module_scopes


class FirstStep:
    """The programs of the first step that one of a script's engines makes.

    Args:
        topology: the chips that the step is traced for, of as many devices as this process has.
        ended: is called with this object when the step is traced; it doesn't return.
    """

    def __init__(self, topology: Topology, *, ended: Callable[["FirstStep"], None]) -> None:
        self._topology, self._ended = topology, ended
        self._programs: dict[str, TracedProgram] = {}
        self._engine: Engine | None = None
        self._batch: list[torch.Tensor] = []
        self._count = WorkCount()
        self._contexts = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which a script runs; nothing is computed in it, and reads give zeros."""
        placed = on_torus(self._topology.torus_to_trace)
        traces = tracing_only(platform="TPU", reads_give_zeros=True)
        with self._contexts, traces, placed, engines_made(self._made), counting_work() as count:
            self._count = count
            yield

    def explanation(self) -> Explanation:
        """Compiles the step, and explains it.

        Raises:
            SpmdZeroRuntimeError: libtpu is missing, or the compiler failed.
        """
        assert self._engine is not None
        ran = tuple(self._programs.values())
        return explain_traced(self._engine, ran, self._topology, self._batch)

    def _made(self, engine: Engine) -> None:
        """Drops what would be computed for a new engine's states, and waits for its programs."""
        require_tpu_compiler()
        placeholders = lowering().placeholders()
        placeholders.stand_for(engine.named_tensors().values())

        def look(graph: StepGraph) -> None:
            self._read(engine, graph, placeholders)

        for context in (
            module_scopes(engine.module), backward_scopes(engine.module), engine.observe(look)
        ):  # fmt: skip
            self._contexts.enter_context(context)

    def _read(self, engine: Engine, graph: StepGraph, placeholders: Placeholders) -> None:
        last = graph.kind == "boundary"
        if graph.kind not in self._programs:
            runs = 1 if last else engine.gradient_accumulation_steps() - 1
            traced = traced_program(graph, runs, placeholders, engine=engine, count=self._count)
            self._programs[graph.kind] = traced
        self._count.take()
        placeholders.stand_for(graph.outputs.values())
        if not self._batch and graph.rows is not None:
            placed = found((graph.rows.args, dict(graph.rows.kwargs)), PlacedBatch)
            self._batch = [batch.tensor for batch in placed]
        if last:
            self._engine = engine
            self._ended(self)
