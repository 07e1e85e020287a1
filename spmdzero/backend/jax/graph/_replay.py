"""A compiled program that is started many times, and puts its results into tensors."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.backend.jax._memory import copied
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.arrays import form_of
from spmdzero.backend.jax.graph._execute import Executable
from spmdzero.backend.jax.lazy._tensor import LazyTensor, over
from spmdzero.backend.jax.lazy._uploads import given
from spmdzero.backend.jax.lazy._values import Space, Value
from spmdzero.backend.jax.lazy._writes import write
from spmdzero.backend.protocols._arrays import Form


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """A compiled program, and the arrangement of its inputs and results.

    Attributes:
        program: JAX's executable.
        inputs: for each input its index in the caller's pool of values.
        donated: numbers of the inputs that are donated, each with whether the program writes into
            the tensor that holds it.
        places: for each result its number among the program's outputs.
        shapes: shape and dtype of each result.
    """

    program: Executable
    inputs: tuple[int, ...]
    donated: tuple[tuple[int, bool], ...]
    places: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    # Shape, dtype and sharding of each result, which the first start shows.
    _forms: list[Form] = dataclasses.field(default_factory=list)

    def started(self, inputs: Sequence[Value]) -> list[Any]:
        """Starts the program, which overwrites donated inputs; returns its outputs."""
        arrays = given(inputs)
        # Another tensor shares this memory, such as one that was a copy of it.
        for place in [place for place, own in self.donated if inputs[place].holders > own]:
            with wide_numbers():
                arrays[place] = copied(arrays[place])
        return self.program.run(arrays)

    def held(
        self, outputs: Sequence[Any], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The tensors that hold the results.

        Args:
            outputs: see `started`.
            into: for each result the tensor into which it is written, or None for a new one.
        """
        made = [outputs[place] for place in self.places]
        if not self._forms:
            return self._held_first(made, into)
        tensors: list[torch.Tensor] = []
        for array, form, target in zip(made, self._forms, into, strict=True):
            if target is None or not _renewed(target, array, form):
                value = Value(form[0], form[1], Space.GLOBAL, array=array)
                value.form = form
                target = _holding(value, target)
            tensors.append(target)
        return tensors

    def _held_first(
        self, made: Sequence[Any], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        values = [
            Value(shape, dtype, Space.GLOBAL, array=array)
            for (shape, dtype), array in zip(self.shapes, made, strict=True)
        ]
        self._forms.extend(map(form_of, values))
        return [_holding(value, target) for value, target in zip(values, into, strict=True)]


def _holding(value: Value, target: torch.Tensor | None) -> torch.Tensor:
    if target is None:
        return over(value)
    write(target, value)
    return target


def _renewed(target: torch.Tensor, array: Any, form: Form) -> bool:
    """Whether `target` alone holds its value, which has become that of `array`.

    A step writes hundreds of tensors, and a new value for each takes longer than all else.
    """
    if not isinstance(target, LazyTensor) or target.steps:
        return False
    cell = target.cell
    value = cell.held
    if value.holders > 1 or value.lasts or value.node is not None or value.form != form:
        return False
    value.renew(array)
    cell.writes += 1
    return True
