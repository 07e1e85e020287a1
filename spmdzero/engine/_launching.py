"""Starts a step's programs on the devices, and shows them to observers before they are compiled."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from spmdzero.backend import Batch, Region, counters, current, map_tensors, programs, runtime
from spmdzero.backend.pure import GeneratorWatch, ModuleWatch
from spmdzero.engine._programs import Call, Compiled, ProgramLog, explained
from spmdzero.state._training import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedRows:
    """The forward of a micro-batch that can be run again; it holds its inputs on the devices.

    Attributes:
        training: the training of the engine.
        region: the replica region in which the forward runs.
        programs: counts the compilations and reads of this class apart from the script's.
        args, kwargs: the forward's placed inputs.
    """

    training: Training
    region: Region
    programs: ProgramLog
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def losses(self, *, times: int) -> dict[str, float]:
        """Path -> value of each undeclared scalar output that has a gradient, thus is a mean.

        The module and the generators are left as they were.

        Args:
            times: number of times that each row is repeated among a device's rows.

        Raises what the module's forward raises.
        """
        before, undone = Compiled.so_far(), ModuleWatch(self.training.module, {})
        try:
            with GeneratorWatch(), undone, self.programs.own_reads(), torch.enable_grad():
                found = self._scalars(times)
                values = torch.stack(list(found.values())).tolist() if found else []
        finally:
            self.programs.not_the_scripts(Compiled.so_far() - before)
        return dict(zip(found, values, strict=True))

    def _scalars(self, times: int) -> dict[str, torch.Tensor]:
        declared = self.training.spmd_config.spmd.outputs
        found: dict[str, torch.Tensor] = {}

        def repeat(_: str, tensor: Any) -> Any:
            return self._repeated(tensor, times) if isinstance(tensor, Batch) else tensor

        def look(path: str, tensor: torch.Tensor) -> torch.Tensor:
            scalar = tensor.dim() == 0 and tensor.is_floating_point()
            if scalar and tensor.requires_grad and path not in declared:
                # A scalar with its graph would keep activations until it is read.
                found[path] = tensor.detach().float()
            return tensor

        args, kwargs = map_tensors((self.args, dict(self.kwargs)), repeat)
        for name in self.training.row_counts & kwargs.keys():
            kwargs[name] = kwargs[name] * times
        map_tensors(self.region.look(args, kwargs), look)
        return found

    def _repeated(self, batch: Batch, times: int) -> Batch:
        if times == 1 or not batch.shared:
            return batch
        rows, mesh = batch.tensor.repeat_interleave(times, batch.dim), self.training.mesh
        marked = mesh.mark(rows, mesh.batch_spec(rows.dim(), batch.dim))
        return dataclasses.replace(batch, tensor=marked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One program that the engine is about to run.

    Attributes:
        kind: ``"boundary"`` at the gradient accumulation boundary, ``"micro"`` before it.
        outputs: the tensors that the program writes, by names such as ``"parameter/wte.weight"``.
        rows: the latest forward that autograd recorded, to be run again; None without one, or if
            each row counts the same on any number of devices.
        summed: name of autograd's node that sums the rows of the engine's outputs into the loss
            that was passed to `backward`; None if no such node was found.
    """

    kind: str
    outputs: Mapping[str, torch.Tensor]
    rows: RepeatedRows | None = None
    summed: str | None = None

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the outputs of the text and of the annotated program, in order."""
        names = list(self.outputs)
        return tuple(names[place] for place in programs.returned(list(self.outputs.values())))

    def hlo(self) -> str:
        """Compiles the pending program without running it; returns optimised HLO, partitioned."""
        return self._optimized

    @functools.cached_property
    def _optimized(self) -> str:
        # Compiled once for all observers of the same graph.
        return programs.optimized_hlo(list(self.outputs.values()))

    def annotated(self) -> bytes | None:
        """The pending program, neither partitioned nor optimised: see `Lowering`.

        None by a backend that can't hand it to another compiler.
        """
        lowering = current().lowering
        return None if lowering is None else lowering.annotated(list(self.outputs.values()))


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
