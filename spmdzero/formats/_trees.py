"""A caller's own values, such as a client state: what becomes of each value inside of them."""

import argparse
import collections
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace)
_DICTS = {dict: dict, collections.OrderedDict: collections.OrderedDict}
# A default is a function, which no checkpoint holds.
_DICTS |= {collections.Counter: collections.Counter, collections.defaultdict: dict}


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of a tree of plain containers, each of whose values is what `leaf` makes of it.

    Dicts, lists, tuples, sets and namespaces are followed, by their exact types; what occurs twice,
    or contains itself, does so in the copy. A defaultdict becomes a dict.
    """
    return _Mapping(leaf).of(tree)


class _Mapping:
    def __init__(self, leaf: Callable[[Any], Any]) -> None:
        self._leaf = leaf
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _DICTS:
            made = self._made[id(value)] = _DICTS[kind]()
            for key, item in value.items():
                made[self.of(key)] = self.of(item)
            if kind is collections.OrderedDict:
                # A module's state dict keeps its version there.
                vars(made).update(self.of(vars(value)))
            return made
        if kind is list:
            made = self._made[id(value)] = []
            made.extend(map(self.of, value))
            return made
        if kind in _ATTRIBUTES:
            made = self._made[id(value)] = kind()
            vars(made).update(self.of(vars(value)))
            return made
        if kind in (tuple, set, frozenset):
            return kind(map(self.of, value))
        return self._leaf(value)


def portable(tree: Any) -> Any:
    """The same values, on the host, as another process reads them: numpy's numbers as Python's.

    Tensors on the devices become copies on the CPU; those that are there already are not copied.
    """
    return mapped(tree, _portable)


def _portable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type in ("cpu", "meta"):
            return value if value.grad_fn is None else value.detach()
        host = value.detach().cpu()
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(host, requires_grad=value.requires_grad)
        return host
    if isinstance(value, np.generic):
        return value.item()
    return value
