"""Copies of a caller's own nested values, such as a client state, with each leaf mapped."""

import argparse
import collections
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace)
_DICTS = {dict: dict, collections.OrderedDict: collections.OrderedDict}
# The default of a defaultdict is a function, which no checkpoint holds.
_DICTS |= {collections.Counter: collections.Counter, collections.defaultdict: dict}


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of a tree of plain containers, with each leaf replaced by the result of `leaf`.

    It enters dicts, lists, tuples, sets and namespaces of exactly these types. Objects that occur
    twice, or contain themselves, do so in the copy, too. A defaultdict becomes a dict.
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
                # A module's state dict keeps its version in its attributes.
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
    """A copy of the values for another process: tensors on the CPU, NumPy's numbers as Python's.

    Tensors on the devices become copies on the CPU; those on the CPU are not copied.
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
