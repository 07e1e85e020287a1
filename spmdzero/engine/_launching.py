"""Starting a step's programs on the devices, and showing them to those who want to see."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from spmdzero._logging import log_once
from spmdzero.backend.torch_xla import (
    annotated_program,
    are_pending,
    memory_maps,
    program_text,
    record_scopes,
    runtime,
)
from spmdzero.engine._programs import Call, Compiled, ProgramLog
from spmdzero.engine._snapshot import StepGraph
from spmdzero.state._training import Training


class Launching:
    """What is handed to the compiler.

    Args:
        training: whose steps.

    Attributes:
        programs: what was compiled, and what was read from the devices, so far.
        donated_inputs: kind of program -> inputs whose buffers it reuses, once compiled.
        observers: see each program's pending graph.
        hooks: registries of hooks around the three calls, which run Python at each step.
        capturing: compiles and starts what is pending in place of the launch, where
            `train_batch` is about to capture it.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.programs = ProgramLog()
        self.donated_inputs: dict[str, int] = {}
        self.observers: list[Callable[[StepGraph], None]] = []
        self.hooks: tuple[Mapping[int, Any], ...] = ()
        self.capturing: Callable[[], None] | None = None

    def launch_states(self) -> None:
        """Compiles and starts what makes the first state.

        Still pending, it would make the first step another program than the second.
        """
        before = Compiled.so_far()
        runtime.sync()
        self.programs.initial = Compiled.so_far() - before

    def note_call(self) -> None:
        """Takes note of a forward that is about to run."""
        self.programs.called(
            Call(
                inputs=self._training.placer.latest,
                training=self._training.module.training,
                gradients=torch.is_grad_enabled(),
            )
        )

    def launch(self, kind: str, *, folded: bool) -> Exception | None:
        """Compiles and starts what is pending; returns what an observer raised.

        The update is pending by then, and would run with whatever comes next: the step has to be
        ended before its error is raised.

        Args:
            kind: ``"micro"``, or ``"boundary"`` with the update in it.
            folded: whether operations of it stand for folded calls.
        """
        step = self._training.counters.global_steps
        self.programs.launching(step)
        failure = self._show(kind) if self.observers else None
        self.programs.compiling.look(self._program_text)
        before = Compiled.so_far()
        launched = f"folded {kind}" if folded else kind
        if self.capturing is not None:
            # Compiled apart from what the three calls launch.
            launched = f"captured {kind}"
            self.capturing()
        runtime.sync()
        compiled = Compiled.so_far() - before
        self.programs.launched(launched, step, compiled)
        if compiled.count:
            self.donated_inputs[kind] = runtime.aliased_inputs()
            self._make_room()
        return failure

    def _show(self, kind: str) -> Exception | None:
        """Hands what is pending to the observers; returns what the first of them raised."""
        failure: Exception | None = None
        training, optimizer = self._training, self._training.optimizer
        outputs = training.named_tensors()
        outputs |= {f"loss/{i}": loss for i, loss in enumerate(training.losses)}
        if kind == "boundary" and optimizer and optimizer.grad_norm is not None:
            outputs["norm/global"] = optimizer.grad_norm
        graph, before = StepGraph(kind=kind, outputs=outputs), Compiled.so_far()
        for observer in self.observers:
            try:
                observer(graph)
            except Exception as error:
                failure = failure or error
        self.programs.not_the_scripts(Compiled.so_far() - before)
        return failure

    def _program_text(self) -> str:
        tensors = [*self._training.named_tensors().values(), *self._training.losses]
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

    @contextlib.contextmanager
    def observe(self, observer: Callable[[StepGraph], None]) -> Iterator[None]:
        """Hands `observer` each program's pending graph just before it is compiled and run.

        An `Exception` of its own is raised once the micro-batch is done.
        """
        self.observers.append(observer)
        try:
            record_scopes(True, by=self)
            yield
        finally:
            self.observers.remove(observer)
            record_scopes(bool(self.observers), by=self)
