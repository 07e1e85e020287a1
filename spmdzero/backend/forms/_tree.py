"""Walks the inputs and outputs of a module, and replaces tensors while keeping every container."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype, type)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A tensor that every replica receives whole, although its dim 0 could pass for a batch."""

    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    """A global tensor whose dim `dim` is the batch of all devices together.

    Attributes:
        shared: whether each device takes its own rows; else each takes all of them, because the
            devices can't share them equally.
        joined: number of batches of equal size that stand in it one after the other; the devices
            share the rows of each.
    """

    tensor: torch.Tensor
    dim: int
    shared: bool = True
    joined: int = 1


def replicated(tensor: torch.Tensor) -> Replicated:
    """Declares that every replica receives `tensor` whole.

    An input whose dim 0 has as many rows as the micro-batch enters the replica region as a
    batch shard. `engine(x, spmdzero.replicated(table))` says that `table` only looks like one.
    """
    return Replicated(tensor)


def map_tensors(tree: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of `tree` with `function(path, tensor)` for each tensor.

    Walks dicts and other mappings, lists, tuples, named tuples, dataclasses (Hugging Face's
    outputs among them) and, as the last resort, the attributes of plain objects (a key-value
    cache). A container none of whose tensors changes is returned itself.
    """
    return _map(tree, function, path, set())


def _map(tree: Any, function: Callable[[str, Any], Any], path: str, parents: set[int]) -> Any:
    if isinstance(tree, torch.Tensor | Replicated | Batch):
        return function(path, tree)
    if isinstance(tree, (*_LEAVES, nn.Module)) or id(tree) in parents:
        return tree
    parents = parents | {id(tree)}

    def visit(key: object, value: Any) -> Any:
        return _map(value, function, f"{path}.{key}" if path else str(key), parents)

    if isinstance(tree, Mapping):
        return _map_mapping(tree, visit)
    if isinstance(tree, tuple | list):
        items = [visit(i, value) for i, value in enumerate(tree)]
        if all(item is value for item, value in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree):
        values = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        changed = {name: visit(name, value) for name, value in values.items()}
        if all(changed[name] is value for name, value in values.items()):
            return tree
        return dataclasses.replace(tree, **changed)
    return _map_object(tree, visit)


def _map_mapping(tree: Any, visit: Callable[[object, Any], Any]) -> Any:
    items = {key: visit(key, value) for key, value in tree.items()}
    if all(items[key] is value for key, value in tree.items()):
        return tree
    if type(tree) is dict:
        return items
    if dataclasses.is_dataclass(tree):
        # transformers' ModelOutput: a mapping of the fields that are set.
        return dataclasses.replace(tree, **items)
    result = copy.copy(tree)
    for key, value in items.items():
        result[key] = value
    return result


def _map_object(tree: Any, visit: Callable[[object, Any], Any]) -> Any:
    attributes = getattr(tree, "__dict__", None)
    if not attributes:
        return tree
    mapped = {name: visit(name, value) for name, value in attributes.items()}
    if all(mapped[name] is value for name, value in attributes.items()):
        return tree
    result = copy.copy(tree)
    result.__dict__.update(mapped)
    return result


def device_types(tree: Any) -> set[str]:
    """The device types, such as ``"cpu"``, of the tensors in `tree` that have dims.

    A 0-dim tensor doesn't count: torch moves such a number by itself.
    """
    found: set[str] = set()

    def look(_: str, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.dim():
            found.add(tensor.device.type)
        return tensor

    map_tensors(tree, look)
    return found
