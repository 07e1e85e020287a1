"""A module's forward and its backward as two operations."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from spmdzero.backend.torch_xla import (
    Batch,
    FoldedFunction,
    Passage,
    Tracing,
    buffer_handles,
    fold,
    map_tensors,
    record_uploads,
    same_value,
    stand_in,
)
from spmdzero.engine._capture_random import GeneratorWatch
from spmdzero.engine._capture_signature import UnknownInputError, freeze
from spmdzero.engine._folded_surroundings import Surroundings
from spmdzero.engine._record import NotCapturableError, refuse_strangers
from spmdzero.state._training import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedPass:
    """The forward of one kind of input.

    Attributes:
        function: parameters, buffers, inputs and keys -> outputs, new buffers, flags.
        keys: how many random draws it makes.
        output: what the module returned, a meta tensor in the place of each tensor.
        form: `output` to be compared.
        markers: the meta tensors, in the order of the outputs.
        differentiable: whether each output carries a gradient.
        buffers, flags: names of those that the forward writes.
    """

    function: FoldedFunction
    keys: int
    output: Any
    form: Hashable
    markers: tuple[torch.Tensor, ...]
    differentiable: tuple[bool, ...]
    buffers: tuple[str, ...]
    flags: tuple[str, ...]

    def difference(self, other: "FoldedPass") -> str | None:
        """Why `other` is another forward than this one, None if it is the same."""
        if self._arrangement() != other._arrangement():
            return (
                "the same inputs gave another graph: Python code in the model took another way, or "
                "a number in it is not the same"
            )
        return changed_number(self.function, other.function)

    def _arrangement(self) -> tuple[object, ...]:
        return (
            self.function.proto,
            self.keys,
            self.form,
            self.differentiable,
            self.buffers,
            self.flags,
            len(self.function.constants),
        )


def changed_number(mine: FoldedFunction, its: FoldedFunction) -> str | None:
    """Why two functions of the same operations don't do the same, None if they do."""
    constants = zip(mine.constants, its.constants, strict=True)
    if all(same_value(one.tensor, other.tensor) for one, other in constants):
        return None
    return (
        "a number that Python makes in the forward changes from step to step: hand it in "
        "as an input tensor, or keep it in a buffer"
    )


class PassTracer:
    """Traces the region of a training with stand-ins.

    Args:
        training: whose; its forward runs in the replica region.
        args, kwargs: the placed inputs, of which only the form matters.

    Attributes:
        state: the module's parameters and buffers.
    """

    def __init__(self, training: Training, args: Any, kwargs: Mapping[str, Any]) -> None:
        assert training.region is not None
        self._region = training.region
        # Not the batch itself, which would stay on the devices.
        self._inputs = map_tensors((args, dict(kwargs)), lambda _, leaf: _like(leaf, _meta()))
        parameters = dict(training.module.named_parameters())
        self._trained = {name: p.requires_grad for name, p in parameters.items()}
        buffers = dict(training.module.named_buffers())
        self._buffers = tuple(buffers)
        self.state = (*parameters.values(), *buffers.values())

    def forward(self, tensors: Sequence[torch.Tensor]) -> FoldedPass:
        """Folds the forward; draws nothing from a generator.

        Args:
            tensors: `state` and the inputs.

        Raises:
            NotCapturableError: it can't be one operation.
        """
        keys: list[torch.Tensor] = []
        values: list[int] = []
        passages: list[Passage] = []
        outputs: list[Any] = []
        markers: list[torch.Tensor] = []
        flat: list[torch.Tensor] = []

        def mark(_: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "xla":
                raise NotCapturableError(
                    "the forward returns a tensor on the CPU, which may be another at each call"
                )
            flat.append(tensor)
            markers.append(_meta())
            return markers[-1]

        def key(value: int) -> torch.Tensor:
            values.append(value)
            keys.append(stand_in((), torch.int32))
            return keys[-1]

        def function(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            passage = self._trace(tensors, key, _ignore)
            outputs.append(map_tensors(passage.output, mark))
            if not flat:
                raise NotCapturableError("the forward returns no tensor")
            passages.append(passage)
            return [*flat, *passage.buffers.values(), *passage.flags.values()]

        generators = GeneratorWatch()
        try:
            with record_uploads() as uploads:
                folded = fold(function, tensors, more=keys)
            if self._region.read_at is not None:
                # The refusal may have been caught where the value was read.
                _refuse_read()
            places = generators.places_of(values)
        finally:
            generators.restore()
        (passage,), (output,) = passages, outputs
        if places != list(range(len(values))) or self._region.recomputes:
            raise NotCapturableError("activation checkpointing runs the forward again in backward")
        replicas = buffer_handles([self._region.replicas])
        refuse_strangers(folded.constants, uploads, known=replicas)
        try:
            form = freeze(output)[0]
        except UnknownInputError as error:
            raise NotCapturableError(str(error).replace("an input is", "an output is")) from error
        return FoldedPass(
            function=folded,
            keys=len(keys),
            output=output,
            form=form,
            markers=tuple(markers),
            differentiable=tuple(tensor.requires_grad for tensor in flat),
            buffers=tuple(passage.buffers),
            flags=tuple(passage.flags),
        )

    def again(
        self,
        tensors: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        sink: Any,
        *,
        around: Surroundings,
    ) -> Passage:
        """Traces the forward once more, for its backward: gradients of the parameters go to `sink`.

        The compiler finds the forward's operations twice in the program, and keeps one of each.

        Args:
            tensors, keys: what the forward took.
            sink: takes a parameter's name and its gradient.
            around: what the forward saw.
        """
        left = iter(keys)
        # What the forward drew was drawn when it ran first; what the backward draws comes on top.
        state = torch.get_rng_state()
        try:
            # Recorded only to have fixed values read as in the forward.
            with torch.enable_grad(), around.restored(), record_uploads():
                return self._trace([t.detach() for t in tensors], lambda _: next(left), sink)
        finally:
            torch.set_rng_state(state)

    def backward(self, passage: Passage, grads: Mapping[int, torch.Tensor], *, folds: bool) -> None:
        """The backward pass of what `again` returned.

        Args:
            passage: traced.
            grads: of the loss, for each output that has one.
            folds: the tensors are stand-ins.

        Raises:
            NotCapturableError: `folds`, and it can't be one operation.
        """
        outputs: list[torch.Tensor] = []
        map_tensors(passage.output, lambda _, tensor: outputs.append(tensor))
        refusing: Any = {"key": _refuse_draw, "read": _refuse_read} if folds else {}
        with self._region.backward(passage.state, **refusing):
            torch.autograd.backward([outputs[index] for index in grads], list(grads.values()))
        if folds and self._region.read_at is not None:
            _refuse_read()

    def _trace(self, tensors: Sequence[torch.Tensor], key: Any, sink: Any) -> Passage:
        given = iter(tensors)
        parameters = {
            name: next(given).requires_grad_(trained) for name, trained in self._trained.items()
        }
        buffers = {name: next(given) for name in self._buffers}
        args, kwargs = map_tensors(self._inputs, lambda _, leaf: _like(leaf, next(given)))
        own = Tracing(parameters=parameters, buffers=buffers, sink=sink, key=key, read=_refuse_read)
        return self._region.trace(args, kwargs, own)


def _like(leaf: Any, tensor: torch.Tensor) -> Any:
    return Batch(tensor, leaf.dim) if isinstance(leaf, Batch) else tensor


def _meta() -> torch.Tensor:
    return torch.empty(0, device="meta")


def _ignore(name: str, grad: torch.Tensor) -> None:
    pass


def _refuse_read(_: torch.Tensor | None = None) -> NoReturn:
    raise NotCapturableError(
        "the forward, or what it has run in backward, reads a value from the devices, by which "
        "Python may choose its way"
    )


def _refuse_draw(_: int) -> NoReturn:
    raise NotCapturableError("what runs in backward draws random numbers")
