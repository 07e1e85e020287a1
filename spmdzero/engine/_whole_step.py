"""A micro-batch as one function of the state, the batch, keys and the host's numbers."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from spmdzero.backend.torch_xla import (
    CapturedProgram,
    ProgramLostError,
    buffer_handles,
    compile_alone,
    draw_keys,
)
from spmdzero.engine._kinds import NotCapturableError
from spmdzero.engine._loss import check_loss, find_loss
from spmdzero.engine._module_tracer import (
    KeySource,
    ModuleTracer,
    TracedFunction,
    fold_python,
)
from spmdzero.engine._places import Form, Place, agreement, forms_of, state_places
from spmdzero.step._loss_health import watched
from spmdzero.step._micro import micro
from spmdzero.step._numbers import loss_scale_number, step_number

if TYPE_CHECKING:
    from spmdzero.engine._train_batch import TrainBatch


def host_numbers(engine: "TrainBatch", *, last: bool) -> list[torch.Tensor]:
    """What the host adds to a micro-batch: the step, fp16's loss scale, and the step's numbers.

    The schedule's hold takes down the same row again when it is asked again.
    """
    optimizer = engine.optimizer
    assert optimizer is not None
    numbers = [step_number(engine.global_steps)]
    if optimizer.loss_scaler is not None:
        numbers.append(loss_scale_number(optimizer.loss_scaler))
    return [*numbers, *optimizer.host_numbers()] if last else numbers


@dataclasses.dataclass(kw_only=True, eq=False)
class WholeStep:
    """A micro-batch, traced.

    Attributes:
        traced: the function of the state that it reads, the inputs, the host's numbers and keys.
            It returns what it writes, and the loss.
        reads: the state that it reads.
        forms: of each of them shape, dtype and sharding.
        writes: the state that it writes.
        summed: parameters that have a gradient afterwards.
        program: what was compiled, None before that.
    """

    traced: TracedFunction
    reads: tuple[Place, ...]
    forms: list[Form]
    writes: tuple[Place, ...]
    summed: frozenset[str]
    program: CapturedProgram | None = None

    def difference(self, other: "WholeStep") -> str | None:
        """Why `other` is another step than this one, None if it is the same."""
        if reason := self.traced.difference(other.traced):
            return reason
        if self._arrangement() != other._arrangement():
            return "the same inputs gave a graph that reads the state in another order"
        return None

    def _arrangement(self) -> tuple[object, ...]:
        reads, writes = [p.name for p in self.reads], [p.name for p in self.writes]
        return reads, self.forms, writes, self.summed

    def state(self) -> list[torch.Tensor]:
        """The tensors that it reads, as they are now.

        Raises:
            NotCapturableError: one is not of the form that it was traced for.
        """
        tensors = [place.tensor for place in self.reads]
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) == len(tensors) and forms_of(present) == self.forms:
            return present
        for place, tensor, form in zip(self.reads, tensors, self.forms, strict=True):
            if tensor is None:
                raise NotCapturableError(f"{place.name} is gone")
            if forms_of([tensor]) != [form]:
                raise NotCapturableError(f"{place.name} has another shape, dtype or sharding")
        return present

    def sources(
        self, engine: "TrainBatch", inputs: Sequence[torch.Tensor], *, last: bool
    ) -> list[torch.Tensor]:
        """Everything that the function takes: draws its keys, uploads the host's part."""
        state = self.state()
        hosts = [*host_numbers(engine, last=last), *draw_keys(self.traced.keys)]
        return [*state, *inputs, *engine.mesh.place_all(hosts)]

    def compile(self, sources: Sequence[torch.Tensor], *, owned: int) -> None:
        """Compiles it as a program that writes into the buffers of the state.

        Args:
            sources: what it will be started with first.
            owned: the first so many of them may share no buffer with each other or the rest.
        """
        handles = buffer_handles(sources)
        if len({*handles[:owned]}) < owned or {*handles[:owned]} & {*handles[owned:]}:
            raise NotCapturableError(
                "two tensors of the state, or an input and one, share a buffer"
            )
        read = {place.name: index for index, place in enumerate(self.reads)}
        donated = {
            index: read[place.name]
            for index, place in enumerate(self.writes)
            if place.name in read and not place.rebinds
        }
        self.program = compile_alone(self.traced.function, sources, donated=donated)

    def start(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Starts the program and puts what it returns in its places; returns the loss."""
        assert self.program is not None
        *values, loss = self.program.run(sources)
        for place, value in zip(self.writes, values, strict=True):
            place.put(value)
        return loss


def trace_whole_step(
    engine: "TrainBatch",
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    *,
    last: bool,
) -> WholeStep:
    """Traces a micro-batch with stand-ins; nothing of the engine changes.

    Args:
        engine: whose.
        args, kwargs: the placed inputs of its forward.
        inputs: the tensors among them.
        last: whether it ends the step.

    Raises:
        NotCapturableError: it can't stand for later ones.
    """
    places = state_places(engine)
    state = {name: place.tensor for name, place in places.items() if place.tensor is not None}
    hosts = host_numbers(engine, last=last)
    tracer = ModuleTracer(engine, args, kwargs)
    results: list[tuple[dict[str, torch.Tensor], frozenset[str]]] = []

    def function(tensors: list[torch.Tensor], key: KeySource) -> list[torch.Tensor]:
        given = dict(zip(state, tensors, strict=False))
        rest = tensors[len(state) :]
        loss, new, summed = _micro_batch(
            engine, tracer, given, rest[: len(inputs)], rest[len(inputs) :], key, last=last
        )
        results.append((new, summed))
        for name in new.keys() - places.keys():
            places[name] = agreement(engine, name.partition("/")[2])
        marked = [engine.mesh.mark(value, places[name].spec) for name, value in new.items()]
        return [*marked, loss]

    region = engine._region
    traced = fold_python(
        function,
        [*state.values(), *inputs, *hosts],
        known=buffer_handles([region.replicas]) if region is not None else (),
        seeds=region is None,
    )
    if region is not None:
        region.note_folded()
    ((new, summed),) = results
    count = len(state)
    kept = [index for index in range(count) if index in traced.function.reads]
    order = [*kept, *range(count, count + len(inputs) + len(hosts))]
    end = count + len(inputs) + len(hosts)
    moved = {old: index for index, old in enumerate(order)}
    moved |= {end + key: len(order) + drawn for key, drawn in enumerate(traced.draws)}
    names = list(state)
    return WholeStep(
        traced=dataclasses.replace(traced, function=traced.function.renumbered(moved)),
        reads=tuple(places[names[index]] for index in kept),
        forms=forms_of([state[names[index]] for index in kept]),
        writes=tuple(places[name] for name in new),
        summed=summed,
    )


def _micro_batch(
    engine: "TrainBatch",
    tracer: ModuleTracer,
    state: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    hosts: Sequence[torch.Tensor],
    key: KeySource,
    *,
    last: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], frozenset[str]]:
    """The loss, the new state by name, and the parameters whose gradients wait afterwards."""
    optimizer, mesh, path = engine.optimizer, engine.mesh, engine._gradients.path
    assert optimizer is not None
    step, *numbers = hosts
    scale = numbers.pop(0) if optimizer.loss_scaler is not None else None
    own = [*(state[f"parameter/{name}"] for name in tracer.parameters)]
    own += [state[f"buffer/{name}"] for name in tracer.buffers]
    result = micro(
        functools.partial(tracer.passage, [*own, *inputs], key=key),
        forward=tracer.forward,
        loss_of=_loss_of,
        path=path,
        accumulation=engine._batch.accumulation,
        loss_scale=scale,
        key=key,
    )
    tracer.refuse_reads()
    loss = result.loss
    new = {"total": state["total"] + loss / engine._batch.accumulation}
    loss = mesh.mark(loss.reshape(()).clone())
    first_bad, finite = watched(loss, step, first_bad=state["first_bad"], finite=state["finite"])
    new["first_bad"] = first_bad
    if engine._health.check:
        new |= {"finite": finite, "loss": loss}
    new |= {f"buffer/{name}": value for name, value in result.buffers.items()}
    for label, flag in result.flags.items():
        known = state.get(f"agreement/{label}")
        new[f"agreement/{label}"] = flag if known is None else known | flag
    accumulators = {
        name: path.plus(name, state[f"accumulator/{name}"], grad)
        for name, grad in result.gradients.items()
        if name in engine._gradients.accumulators
    }
    if not last:
        new |= {f"accumulator/{name}": value for name, value in accumulators.items()}
        return loss, new, engine._gradients.names | frozenset(accumulators)
    waiting = {
        name: accumulators.get(name, state.get(f"accumulator/{name}", result.gradients.get(name)))
        for name in optimizer.trained
    }
    states = {
        name: {slot: state[f"{slot}/{name}"] for slot in optimizer.state[parameter]}
        for name, parameter in optimizer.trained.items()
    }
    stepped = optimizer.boundary()(
        gradients={name: path.final(name, grad) for name, grad in waiting.items()},
        parameters={name: state[f"parameter/{name}"] for name in waiting},
        states=states,
        applied=state["applied"],
        skipped=state["skipped"],
        numbers=numbers,
        finite=finite if engine._health.check else None,
    )
    new |= {"norm": stepped.norm, "applied": stepped.applied}
    if stepped.skipped is not state["skipped"]:
        new["skipped"] = stepped.skipped
    for name, parameter in stepped.parameters.items():
        new[f"parameter/{name}"] = parameter
        new |= {f"{slot}/{name}": value for slot, value in stepped.states[name].items()}
    for name in engine._gradients.accumulators:
        zeros = path.zeros(name)
        assert zeros is not None
        new[f"accumulator/{name}"] = zeros
    return loss, new, frozenset()


def _loss_of(output: Any) -> torch.Tensor:
    loss = find_loss(output)
    check_loss(loss)
    return loss


__all__ = ["ProgramLostError", "WholeStep", "host_numbers", "trace_whole_step"]
