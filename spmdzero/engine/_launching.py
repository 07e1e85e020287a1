"""Starts a step's programs on the devices, and shows them to observers."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from spmdzero.backend import counters, programs, runtime
from spmdzero.engine._programs import Call, Compiled, ProgramLog, explained
from spmdzero.engine._repeated_rows import RepeatedRows
from spmdzero.engine._snapshot import StepGraph
from spmdzero.state._training import Training


class Launching:
    """Compiles and starts the pending programs of an engine.

    Args:
        training: the training of the engine.

    Attributes:
        programs: a log of the compiled programs and of the reads from the devices so far.
        donated_inputs: kind of program -> number of inputs whose buffers the compiled program
            reuses.
        observers: functions that take each program's pending graph.
        hooks: registries of hooks around the three calls, which run Python at each step.
        summed: the node that sums the rows of the engine's outputs into the latest loss, see
            `StepGraph`.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.programs = ProgramLog()
        self.donated_inputs: dict[str, int] = {}
        self.observers: list[Callable[[StepGraph], None]] = []
        self.hooks: tuple[Mapping[int, Any], ...] = ()
        self._rows: RepeatedRows | None = None
        self.summed: str | None = None

    def launch_states(self) -> None:
        """Compiles and starts the program that makes the first state.

        If it were still pending, the first step would need a different program from the second.
        """
        before = Compiled.so_far()
        with explained("what makes the first state"):
            runtime.sync()
        self.programs.initial = Compiled.so_far() - before

    def note_call(self, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """Takes note of a forward that is about to run, on placed inputs."""
        training = self._training
        # Kept without an observer, the inputs would stay on the devices.
        if self.observers and torch.is_grad_enabled() and training.region is not None:
            self._rows = RepeatedRows(
                training=training,
                region=training.region,
                programs=self.programs,
                args=args,
                kwargs=kwargs or {},
            )
        self.programs.called(
            Call(
                inputs=self._training.placer.latest,
                training=self._training.module.training,
                gradients=torch.is_grad_enabled(),
            )
        )

    def launch(self, kind: str, *, folded: bool) -> Exception | None:
        """Compiles and starts the pending program; returns the error that an observer raised.

        The update is part of the pending program, and would otherwise run with the next one: the
        step has to be ended before the observer's error is raised.

        Args:
            kind: ``"micro"``, or ``"boundary"`` with the update in it.
            folded: whether some of its operations are folded calls.
        """
        self.programs.launching(self._training.counters.global_steps)
        failure = self._show(kind) if self.observers else None
        self.programs.compiling.look(self._program_text)
        before = Compiled.so_far()
        launched = f"captured {kind}" if folded else kind
        with self.compiling(kind, new=self.programs.is_new(launched)):
            runtime.sync()
        self._launched(kind, launched, Compiled.so_far() - before)
        return failure

    def compiling(self, kind: str, *, new: bool = True) -> contextlib.AbstractContextManager[None]:
        """Surrounds the compilation of a program; explains a long silence if it is `new`."""
        what = "a micro-batch that accumulates"
        if kind == "boundary":
            alone = self._training.batch.accumulation == 1
            what = "the step" if alone else "the step's last micro-batch"
        return explained(what, often="once for each shape of its inputs", new=new)

    def repeated(self, kind: str, start: Callable[[], bool]) -> bool:
        """Takes note of a folded micro-batch that `start` starts whole, if it returns True."""
        self.programs.launching(self._training.counters.global_steps)
        before = Compiled.so_far()
        started = start()
        compiled = Compiled.so_far() - before
        if started:
            self._launched(kind, f"captured {kind}", compiled)
        else:
            self.programs.not_the_scripts(compiled)
        return started

    def _launched(self, kind: str, name: str, compiled: Compiled) -> None:
        self.programs.launched(name, self._training.counters.global_steps, compiled)
        if compiled.count:
            self.donated_inputs[kind] = counters.aliased_inputs()

    def _show(self, kind: str) -> Exception | None:
        """Hands the pending graph to the observers; returns the first error that they raised."""
        failure: Exception | None = None
        training, optimizer = self._training, self._training.optimizer
        outputs = training.named_tensors()
        outputs |= {f"loss/{i}": loss for i, loss in enumerate(training.current.losses)}
        if kind == "boundary" and optimizer and optimizer.grad_norm is not None:
            outputs["norm/global"] = optimizer.grad_norm
        graph = StepGraph(kind=kind, outputs=outputs, rows=self._rows, summed=self.summed)
        self._rows = self.summed = None
        before = Compiled.so_far()
        for observer in self.observers:
            try:
                observer(graph)
            except Exception as error:
                failure = failure or error
        self.programs.not_the_scripts(Compiled.so_far() - before)
        return failure

    def _program_text(self) -> str:
        tensors = [*self._training.named_tensors().values(), *self._training.current.losses]
        # The script may have everything computed before a micro-batch ends.
        return programs.text(tensors)

    @contextlib.contextmanager
    def observe(self, observer: Callable[[StepGraph], None]) -> Iterator[None]:
        """Hands `observer` each program's pending graph just before it is compiled and run.

        An `Exception` that `observer` raises is raised once the micro-batch is done.
        """
        self.observers.append(observer)
        try:
            programs.record_scopes(True, by=self)
            yield
        finally:
            self.observers.remove(observer)
            programs.record_scopes(bool(self.observers), by=self)
