"""Puts what a program has made into tensors."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.backend.jax._tensor import over
from spmdzero.backend.jax._values import Space, Value
from spmdzero.backend.jax._writes import write
from spmdzero.backend.jax.arrays import form_of
from spmdzero.backend.protocols._arrays import Form


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """The results of a program that is started many times.

    Attributes:
        places: of each result its number among the program's outputs.
        shapes: shape and dtype of each.
    """

    places: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    # Shape, dtype and sharding of each, which the first start shows.
    _forms: list[Form | None] = dataclasses.field(default_factory=list)

    def held(self, made: Sequence[Any], into: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The tensors that hold the results.

        Args:
            made: arrays, the program's outputs.
            into: of each result the tensor into which it is written, or None for a new one.
        """
        known = bool(self._forms)
        forms = self._forms if known else [None] * len(self.places)
        tensors: list[torch.Tensor] = []
        given = zip(self.places, self.shapes, forms, into, strict=True)
        for place, (shape, dtype), form, target in given:
            value = Value(shape, dtype, Space.GLOBAL, array=made[place])
            value.form = form
            if not known:
                self._forms.append(form_of(value))
            if target is None:
                target = over(value)
            else:
                write(target, value)
            tensors.append(target)
        return tensors
