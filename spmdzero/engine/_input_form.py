"""The form of a micro-batch's inputs, which decides which program runs it."""

import collections
import dataclasses
import enum
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from spmdzero.backend import Batch, arrays

_VALUES = (str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype, enum.Enum)


class UnknownInputError(TypeError):
    """Raised for an input whose value can't be compared between steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputForm:
    """The inputs of one forward, placed on the devices.

    Attributes:
        form: containers and their attributes, values that are no tensors, and each tensor's shape,
            dtype, batch dim, sharding and the first tensor that has the same buffer.
        tensors: the tensors, in the order of `form`.
    """

    form: Hashable
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "InputForm":
        """The form of placed inputs, none of which is pending.

        Raises:
            UnknownInputError: an object that is neither a container nor a plain value.
        """
        form, tensors = freeze((args, dict(kwargs)))
        handles = arrays.buffer_handles(tensors)
        shared = tuple(handles.index(handle) for handle in handles)
        return cls(form=(form, tuple(arrays.forms_of(tensors)), shared), tensors=tuple(tensors))


def freeze(tree: Any) -> tuple[Hashable, list[torch.Tensor]]:
    """The form of `tree`, without shardings and shared buffers, and its tensors in that order.

    Raises:
        UnknownInputError: see `InputForm.of`.
    """
    tensors: list[torch.Tensor] = []
    return _freeze(tree, tensors), tensors


def _freeze(tree: Any, tensors: list[torch.Tensor]) -> Hashable:
    if isinstance(tree, Batch | torch.Tensor) and _tensor(tree).requires_grad:
        raise UnknownInputError("an input requires a gradient")
    if isinstance(tree, Batch):
        tensors.append(tree.tensor)
        kind = "batch", tree.dim, tree.shared, tree.joined
        return *kind, tree.tensor.shape, tree.tensor.dtype
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return "tensor", tree.shape, tree.dtype
    if isinstance(tree, _VALUES):
        return type(tree), tree
    if isinstance(tree, Mapping):
        items = tuple((key, _freeze(value, tensors)) for key, value in tree.items())
        return type(tree), items, _beside(tree)
    if isinstance(tree, tuple | list):
        return type(tree), tuple(_freeze(value, tensors) for value in tree), _beside(tree)
    if dataclasses.is_dataclass(tree):
        fields = (getattr(tree, field.name) for field in dataclasses.fields(tree))
        return type(tree), tuple(_freeze(value, tensors) for value in fields), _beside(tree)
    raise UnknownInputError(
        f"an input is a {type(tree).__name__}, whose content can't be compared between steps"
    )


def _beside(container: Any) -> Hashable:
    """The attributes of a container beside its items, which a user's class may have."""
    own = getattr(container, "__dict__", None)
    if not own:
        return None
    if dataclasses.is_dataclass(container):
        known = {field.name for field in dataclasses.fields(container)}
    else:
        known = {"data"} if isinstance(container, collections.UserDict) else set()
    tensors: list[torch.Tensor] = []
    found = tuple((k, _freeze(value, tensors)) for k, value in own.items() if k not in known)
    if tensors:
        raise UnknownInputError(
            f"an input is a {type(container).__name__} with a tensor that is not one of its items"
        )
    return found


def _tensor(leaf: Batch | torch.Tensor) -> torch.Tensor:
    return leaf.tensor if isinstance(leaf, Batch) else leaf
