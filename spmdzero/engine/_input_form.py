"""The form of a micro-batch's inputs, which decides which program runs it."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from spmdzero.backend import (
    TENSORS,
    Batch,
    UnknownContentError,
    form_of,
    refuse_unknown,
)


class UnknownInputError(TypeError):
    """Raised for an input whose value can't be compared between steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputForm:
    """The inputs of one forward, placed on the devices.

    Attributes:
        form: containers and their attributes, values that are no tensors, and each tensor's shape,
            dtype and batch dim.
        tensors: the tensors, in the order of `form`.
    """

    form: Hashable
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "InputForm":
        """The form of placed inputs.

        Raises:
            UnknownInputError: an input requires a gradient, or is neither a container nor a plain
                value.
        """
        form, tensors = _taken_apart((args, dict(kwargs)))
        return cls(form=form, tensors=tuple(tensors))


def _taken_apart(tree: Any) -> tuple[Hashable, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def leaf(given: Any) -> Hashable:
        tensor = given if isinstance(given, torch.Tensor) else given.tensor
        if tensor.requires_grad:
            raise UnknownInputError("an input requires a gradient")
        tensors.append(tensor)
        rows = (given.dim, given.shared, given.joined) if isinstance(given, Batch) else None
        return rows, tensor.shape, tensor.dtype

    try:
        # A subclass of torch's tensors would run Python for each attribute.
        with torch._C.DisableTorchFunctionSubclass():
            return form_of(tree, TENSORS, leaf, refuse_unknown), tensors
    except UnknownContentError as error:
        raise UnknownInputError(f"an input is {error}") from None
    except RecursionError:
        raise UnknownInputError("an input is a container that holds itself") from None
