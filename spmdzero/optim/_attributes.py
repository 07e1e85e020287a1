"""The attributes of a user's own optimizer beside its groups and states, to be compared."""

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.optim._substituted import PUT_ON

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 3


class _Same:
    """Wraps an object that it keeps alive; equal to other wrappers of the same object."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)


def attributes_of(optimizer: torch.optim.Optimizer) -> Hashable:
    """The attributes that an optimizer's class, or a subclass, has set on it.

    Plain values, containers and the attributes of objects are compared by value, three levels
    deep; all others by identity, and tensors also by their version.
    """
    own = {name: value for name, value in vars(optimizer).items() if name not in _torchs()}
    return _frozen(own, _DEPTH)


@functools.cache
def _torchs() -> frozenset[str]:
    """torch's own attributes, and the methods that are put on an optimizer.

    Computed at the first call, not at import: torch's first optimizer imports its compiler, which
    takes 2 s of a core.
    """
    return frozenset({*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), *PUT_ON})


def _frozen(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return _Same(value), value._version
    if depth and isinstance(value, Mapping):
        items = [(_frozen(key, 0), _frozen(item, depth - 1)) for key, item in value.items()]
        return type(value), tuple(items)
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple([_frozen(item, depth - 1) for item in value])
    held = getattr(value, "__dict__", None)
    if depth and held and not isinstance(value, type | nn.Module):
        return _Same(value), _frozen(held, depth - 1)
    return _Same(value)
