"""Traces a micro-batch as one function of the state, the batch, keys and the host's numbers."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend import CompiledProgram, Form, arrays, compiler, draw_keys
from spmdzero.engine._kinds import NotCapturableError
from spmdzero.engine._loss import check_loss, find_loss
from spmdzero.engine._module_tracer import (
    KeySource,
    ModuleTracer,
    TracedFunction,
    fold_forward,
    refuse_read,
)
from spmdzero.state._training import Training
from spmdzero.step._numbers import loss_scale_number, step_number
from spmdzero.step._pure_step import StepProgram
from spmdzero.step._state import Place, tensors_in


def host_numbers(training: Training, *, last: bool) -> list[torch.Tensor]:
    """The numbers that the host gives a micro-batch: step, fp16's loss scale, optimizer's numbers.

    Calling this twice is safe: the schedule's hold then records the same row again.
    """
    optimizer = training.optimizer
    assert optimizer is not None
    numbers = [step_number(training.counters.global_steps)]
    if optimizer.scaler is not None:
        numbers.append(loss_scale_number(optimizer.scaler))
    return [*numbers, *optimizer.host_numbers()] if last else numbers


@dataclasses.dataclass(kw_only=True, eq=False)
class WholeStep:
    """A traced micro-batch.

    Attributes:
        traced: the function of the state that it reads, the inputs, the host's numbers and keys. It
            returns the state that it writes, and the loss.
        reads: the places of the state that it reads.
        forms: shape, dtype and sharding of each of these tensors.
        writes: the places of the state that it writes.
        summed: names of the parameters that have a gradient afterwards.
        program: the compiled program, None before it is compiled.
    """

    traced: TracedFunction
    reads: tuple[Place, ...]
    forms: list[Form]
    writes: tuple[Place, ...]
    summed: frozenset[str]
    program: CompiledProgram | None = None

    def difference(self, other: "WholeStep") -> str | None:
        """How `other` differs from this step, or None if they are the same."""
        return self.traced.difference(other.traced)

    def state(self) -> list[torch.Tensor]:
        """The present tensors of the state that it reads.

        Raises:
            NotCapturableError: a tensor doesn't have the form for which the step was traced.
        """
        tensors = tensors_in(self.reads)
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) == len(tensors) and arrays.forms_of(present) == self.forms:
            return present
        for place, tensor, form in zip(self.reads, tensors, self.forms, strict=True):
            if tensor is None:
                raise NotCapturableError(f"{place.name} is gone")
            if arrays.forms_of([tensor]) != [form]:
                raise NotCapturableError(f"{place.name} has another shape, dtype or sharding")
        return present

    def sources(
        self, training: Training, inputs: Sequence[torch.Tensor], *, last: bool
    ) -> list[torch.Tensor]:
        """All inputs of the function; draws its keys and uploads the host's numbers."""
        state = self.state()
        hosts = [*host_numbers(training, last=last), *draw_keys(self.traced.keys)]
        return [*state, *inputs, *training.mesh.place_all(hosts)]

    def compile(self, sources: Sequence[torch.Tensor]) -> None:
        """Compiles the step as a program that writes into the buffers of the state.

        Args:
            sources: the inputs with which it will be started first.

        Raises:
            NotCapturableError: a tensor of the state shares its buffer with another tensor.
        """
        handles, count = arrays.buffer_handles(sources), len(self.reads)
        if len({*handles[:count]}) < count or {*handles[:count]} & {*handles[count:]}:
            raise NotCapturableError(
                "two tensors of the state, or an input and one, share a buffer"
            )
        read = {place.name: index for index, place in enumerate(self.reads)}
        donated = {
            index: read[place.name]
            for index, place in enumerate(self.writes)
            if place.name in read and not place.replaced
        }
        function = self.traced.function
        self.program = compiler.compile_alone(function, sources, donated=donated, state=count)

    def start(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Starts the program and puts its outputs into their places; returns the loss."""
        assert self.program is not None
        into = [
            None if place.replaced else tensor
            for place, tensor in zip(self.writes, tensors_in(self.writes), strict=True)
        ]
        *values, loss = self.program.run(sources, [*into, None])
        for place, value in zip(self.writes, values, strict=True):
            if place.replaced:
                place.registry[place.key] = value
        return loss


def trace_whole_step(
    training: Training,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    *,
    last: bool,
) -> WholeStep:
    """Traces a micro-batch with stand-ins; the engine's state doesn't change.

    Args:
        training: the training of the engine.
        args, kwargs: the placed inputs of the forward.
        inputs: the tensors among them.
        last: whether the micro-batch ends the step.

    Raises:
        NotCapturableError: the trace can't be used for later micro-batches.
    """
    places, region = {place.name: place for place in training.state.places()}, training.region
    state = {name: place.tensor for name, place in places.items() if place.tensor is not None}
    hosts = host_numbers(training, last=last)
    tracer, program = ModuleTracer(training, args, kwargs), step_program(training, last=last)
    written: list[str] = []

    def function(tensors: list[torch.Tensor], key: KeySource) -> list[torch.Tensor]:
        given = iter(tensors)
        named = {name: next(given) for name in state}
        own = [named[name] for name in tracer.names] + [next(given) for _ in inputs]
        run = functools.partial(tracer.passage, own, key=key)
        backward = functools.partial(tracer.forward.backward, key=key, read=refuse_read)
        loss, new = program(named, [*given], run=run, backward=backward)
        tracer.refuse_reads()
        written[:] = new
        for name in new.keys() - places.keys():
            places[name] = training.state.place(name)
        return [*(training.mesh.mark(new[name], places[name].spec) for name in new), loss]

    traced = fold_forward(
        function,
        [*state.values(), *inputs, *hosts],
        known=tracer.known([*state.values()]),
        seeds=region is None,
    )
    if region is not None:
        region.note_folded()
    traced, read = traced.narrowed(len(state), len(state) + len(inputs) + len(hosts))
    names = list(state)
    reads = [names[index] for index in read]
    present = [state[name] for name in reads]
    for name, pending in zip(reads, arrays.are_pending(present), strict=True):
        # All that was pending has been started, but for what is taken out of another tensor.
        if pending:
            raise NotCapturableError(f"{name} is a view of another tensor")
    forms = arrays.forms_of(present)
    added = {name.partition("/")[2] for name in written if name.startswith("accumulator/")}
    return WholeStep(
        traced=traced.labelled(reads, forms, written),
        reads=tuple(places[name] for name in reads),
        forms=forms,
        writes=tuple(places[name] for name in written),
        summed=frozenset() if last else training.gradients.names | added,
    )


def step_program(training: Training, *, last: bool) -> StepProgram:
    """The program of the training's micro-batches that end a step, or of those that don't."""
    optimizer = training.optimizer
    assert optimizer is not None
    return StepProgram(
        mesh=training.mesh,
        in_region=training.region is not None,
        loss_of=_loss_of,
        path=training.gradients.path,
        boundary=optimizer.boundary() if last else None,
        accumulation=training.batch.accumulation,
        scaled=optimizer.scaler is not None,
        checks=training.health.check,
    )


def _loss_of(output: Any) -> torch.Tensor:
    loss = find_loss(output)
    check_loss(loss)
    return loss
