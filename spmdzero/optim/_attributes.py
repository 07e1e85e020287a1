"""What a user's own optimizer holds beside its groups and states, to be compared."""

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.optim._substituted import PUT_ON

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 3


class _Same:
    """Equal to what holds the same object, which it keeps: no other can have its address."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)


def attributes_of(optimizer: torch.optim.Optimizer) -> Hashable:
    """The attributes that its class, or a subclass, has given it.

    Plain values, containers and the attributes of objects are compared by value, three levels
    deep; other things by identity, and tensors by their version too.
    """
    own = {name: value for name, value in vars(optimizer).items() if name not in _torchs()}
    return _frozen(own, _DEPTH)


@functools.cache
def _torchs() -> frozenset[str]:
    """Torch's own attributes, and the methods that are put on an optimizer.

    Not when this file is imported: torch's first optimizer imports its compiler, 2 s of a core.
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
