"""Traces the user's Python with stand-ins: a module's forward as a function of tensors."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch

from spmdzero._user_line import user_line
from spmdzero.backend import (
    Batch,
    FoldedFunction,
    Mesh,
    Passage,
    Tracing,
    compiler,
    draw_keys,
    map_tensors,
)
from spmdzero.backend.pure import device_attributes, fold_python, same_constants
from spmdzero.engine._kinds import NotCapturableError
from spmdzero.state._still_placed import require_planned
from spmdzero.state._training import Training

# The value of a random draw's key -> the key on the devices.
KeySource = Callable[[int], torch.Tensor]


class ModuleTracer:
    """Runs a module on given parameters, buffers and inputs instead of its own.

    Args:
        training: the training of the engine.
        args, kwargs: the placed inputs; only their form matters.

    Raises:
        SpmdZeroUsageError: the module has a parameter that wasn't planned.

    Attributes:
        parameters, buffers: the module's own, by name.
    """

    def __init__(self, training: Training, args: Any, kwargs: Mapping[str, Any]) -> None:
        require_planned(training)
        self._training, self.forward = training, training.forward
        # It keeps the inputs' forms, and not the batch itself, which would stay on the devices.
        self._inputs = map_tensors((args, dict(kwargs)), lambda _, leaf: _like(leaf, _meta()))
        self.parameters = dict(training.module.named_parameters())
        self._trained = {name: p.requires_grad for name, p in self.parameters.items()}
        self.buffers = dict(training.module.named_buffers())

    @property
    def names(self) -> list[str]:
        """The names of the tensors of `state`, as in `StepProgram`."""
        parameters = [f"parameter/{name}" for name in self.parameters]
        return parameters + [f"buffer/{name}" for name in self.buffers]

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The module's parameters and buffers."""
        return (*self.parameters.values(), *self.buffers.values())

    def passage(self, tensors: Sequence[torch.Tensor], *, key: KeySource, sink: Any) -> Passage:
        """Traces one forward.

        Args:
            tensors: used in place of `state` and the inputs.
            key: gives the keys of random draws.
            sink: takes each parameter's name and gradient in a backward.

        Raises:
            NotCapturableError: Python reads a value.
        """
        given = iter(tensors)
        parameters = {
            name: next(given).requires_grad_(trained) for name, trained in self._trained.items()
        }
        buffers = {name: next(given) for name in self.buffers}
        args, kwargs = map_tensors(self._inputs, lambda _, leaf: _like(leaf, next(given)))
        own = Tracing(parameters=parameters, buffers=buffers, sink=sink, key=key, read=refuse_read)
        passage = self.forward.trace(args, kwargs, own)
        self.refuse_reads()
        return passage

    def known(self, state: Sequence[torch.Tensor]) -> set[int]:
        """Handles of the buffers that the module may read beside `state` and its inputs.

        An attribute that shares a buffer of the state is not among them: steps write there.
        """
        region = self._training.region
        known = {*compiler.handles([region.replicas])} if region is not None else set()
        attributes = device_attributes(self._training.module)
        if attributes:
            known |= {*compiler.handles(attributes)} - {*compiler.handles(state)}
        return known

    def refuse_reads(self) -> None:
        """Raises NotCapturableError for a read whose refusal the user's code caught."""
        if self.forward.read_at is not None:
            refuse_read(at=self.forward.read_at)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedFunction:
    """A folded function, made by running the user's Python once.

    Attributes:
        function: takes the keys of its random draws after its inputs.
        draws: the index of each key among those that `draw_keys` draws: checkpointing draws some
            keys again.
        seeded: whether it draws from the devices' own generator, whose seed it takes as a last key.
        labels: values that must also be the same in each trace.
    """

    function: FoldedFunction
    draws: tuple[int, ...] = ()
    seeded: bool = False
    labels: Any = None

    @property
    def keys(self) -> int:
        """Number of keys that the function takes."""
        return len(set(self.draws)) + self.seeded

    def drawn(self, mesh: Mesh) -> list[torch.Tensor]:
        """The keys of a call, which are drawn now."""
        keys = mesh.place_all(draw_keys(len(set(self.draws))))
        return [*keys, compiler.take_seed()] if self.seeded else keys

    def labelled(self, *labels: Any) -> "TracedFunction":
        """The same function with these labels."""
        return dataclasses.replace(self, labels=labels)

    def difference(self, other: "TracedFunction") -> str | None:
        """How `other` differs from this function, or None if they are the same."""
        mine, its = self.function, other.function
        if (mine.proto, mine.arrangement, self.draws, self.labels) != (
            *(its.proto, its.arrangement, other.draws, other.labels),
        ):
            return (
                "the same inputs gave another graph: Python code in the model took another way, or "
                "a number in it is not the same"
            )
        if same_constants(mine.constants, its.constants):
            return None
        return (
            "a number that Python makes in the forward changes from step to step: hand it in "
            "as an input tensor, or keep it in a buffer"
        )


def fold_forward(
    function: Callable[[list[torch.Tensor], KeySource], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    *,
    known: Collection[int],
    seeded: bool,
) -> TracedFunction:
    """Folds `function`, which runs the module's forward and may draw keys.

    Each draw has an input of its own, also where checkpointing draws a key again.

    Args:
        function: takes stand-ins of the tensors, and what draws keys.
        tensors: its inputs.
        known: see `fold_python`.
        seeded: whether it may draw from the devices' own generator, and draws no keys.

    Raises:
        ImpureError: see `fold_python`.
    """
    keys: list[torch.Tensor] = []
    values: list[int] = []

    def key(value: int) -> torch.Tensor:
        values.append(value)
        keys.append(compiler.stand_in((), torch.int32))
        return keys[-1]

    def seeded_function(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        keys.append(compiler.stand_in((), torch.int32))
        with compiler.drawing(keys[0]):
            return function(given, key)

    folded, draws = fold_python(
        seeded_function if seeded else lambda given: function(given, key),
        tensors,
        who="the forward",
        more=keys,
        drawn=values,
        known=known,
    )
    drawn = seeded and len(tensors) in folded.reads
    return TracedFunction(function=folded, draws=tuple(draws), seeded=drawn)


def refuse_read(_: torch.Tensor | None = None, *, at: str | None = None) -> NoReturn:
    """Raises NotCapturableError for a read of a value, at the running line or at `at`."""
    raise NotCapturableError(
        f"the forward, or what it has run in backward, reads a value from the devices at "
        f"{at or user_line()}, by which Python may choose its way"
    )


def _meta() -> torch.Tensor:
    return torch.empty(0, device="meta")


def _like(leaf: Any, tensor: torch.Tensor) -> Any:
    return dataclasses.replace(leaf, tensor=tensor) if isinstance(leaf, Batch) else tensor
