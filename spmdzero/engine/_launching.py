"""Starting a step's programs on the devices, and showing them to those who want to see."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from spmdzero._logging import log_once
from spmdzero.backend.torch_xla import (
    ReplicaRegion,
    annotated_program,
    are_pending,
    memory_maps,
    program_text,
    record_scopes,
    runtime,
)
from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._folded import FoldedCalls
from spmdzero.engine._folded_call import keep_waiting
from spmdzero.engine._programs import Call, Compiled, ProgramLog
from spmdzero.engine._snapshot import StepGraph

if TYPE_CHECKING:
    from spmdzero.engine._engine import Engine


class Launching(Accumulation):
    """What the engine hands to the compiler.

    Attributes:
        explain: whether a step fits, what it moves, what it waits for; see `spmdzero.explain`.
    """

    donated_inputs: dict[str, int]
    audit: Callable[..., Any]
    doctor: Callable[..., Any]
    explain: Callable[..., Any]
    _region: ReplicaRegion | None
    _observers: list[Callable[[StepGraph], None]]
    _losses: list[torch.Tensor]

    @functools.cached_property
    def programs(self) -> ProgramLog:
        """What was compiled, and what was read from the devices, so far."""
        return ProgramLog()

    @functools.cached_property
    def folding(self) -> FoldedCalls:
        """How much of the three calls is traced: see `FoldedCalls`."""
        return FoldedCalls(cast("Engine", self))

    def _note_call(self) -> None:
        self.programs.called(
            Call(
                inputs=self._placer.latest,
                training=self.module.training,
                gradients=torch.is_grad_enabled(),
            )
        )

    def _launch(self, kind: str) -> Exception | None:
        """Compiles and starts what is pending; returns what an observer raised.

        The update is pending by then, and would run with whatever comes next: the step has to be
        ended before its error is raised.
        """
        self.programs.launching(self.global_steps)
        failure = self._show(kind) if self._observers else None
        self.programs.compiling.look(self._program_text)
        before = Compiled.so_far()
        launched = f"folded {kind}" if self.folding.launching() else kind
        runtime.sync()
        compiled = Compiled.so_far() - before
        self.programs.launched(launched, self.global_steps, compiled)
        if compiled.count:
            self.donated_inputs[kind] = runtime.aliased_inputs()
            self._make_room()
        return failure

    def _show(self, kind: str) -> Exception | None:
        """Hands what is pending to the observers; returns what the first of them raised."""
        failure: Exception | None = None
        outputs = self.named_tensors()
        outputs |= {f"loss/{i}": loss for i, loss in enumerate(self._losses)}
        if kind == "boundary" and self.optimizer and self.optimizer.grad_norm is not None:
            outputs["norm/global"] = self.optimizer.grad_norm
        graph, before = StepGraph(kind=kind, outputs=outputs), Compiled.so_far()
        for observer in self._observers:
            try:
                observer(graph)
            except Exception as error:
                failure = failure or error
        self.programs.not_the_scripts(Compiled.so_far() - before)
        return failure

    def _end_unstepped(self) -> None:
        """Starts a micro-batch that no `step` ends."""
        keep_waiting(ending=None)
        failure = self._launch("micro")
        self._backward_done = False
        if failure is not None:
            raise failure

    def _program_text(self) -> str:
        tensors = [*self.named_tensors().values(), *self._losses]
        roots = [t for t, pends in zip(tensors, are_pending(tensors), strict=True) if pends]
        # The script may have had everything computed before a micro-batch ends.
        return program_text(annotated_program(roots)[0]) if roots else ""

    def _make_room(self) -> None:
        before = Compiled.so_far()
        if memory_maps.make_room():
            self.programs.not_the_scripts(Compiled.so_far() - before)
            log_once(
                "compiled programs had taken three quarters of the memory maps that Linux lets a "
                "process have (vm.max_map_count), so the least used ones were let go of"
            )

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor under ``<role>/<name>``: parameters, buffers, accumulators, states."""
        tensors = {f"parameter/{n}": p for n, p in self.module.named_parameters()}
        tensors |= {f"buffer/{n}": b for n, b in self.module.named_buffers()}
        tensors |= {f"accumulator/{n}": a for n, a in self._gradients.accumulators.items()}
        return tensors | (self.optimizer.named_states() if self.optimizer else {})

    @contextlib.contextmanager
    def observe(self, observer: Callable[[StepGraph], None]) -> Iterator[None]:
        """Hands `observer` each program's pending graph just before it is compiled and run.

        An `Exception` of its own is raised once the micro-batch is done.
        """
        self._observers.append(observer)
        try:
            record_scopes(True, by=self)
            yield
        finally:
            self._observers.remove(observer)
            record_scopes(bool(self._observers), by=self)
