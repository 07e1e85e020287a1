"""Walks lists, tuples and dicts of values, slots or tensors."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

Leaf = TypeVar("Leaf")


def found(tree: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """The leaves of class `kind`, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from found(item, kind)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from found(item, kind)


def swapped(tree: Any, kind: type[Leaf], get: Callable[[Leaf], Any]) -> Any:
    """A copy of `tree` with `get(leaf)` for leaves of `kind`; tuple subclasses become tuples."""
    if isinstance(tree, kind):
        return get(tree)
    if isinstance(tree, tuple):
        return tuple([swapped(item, kind, get) for item in tree])
    if isinstance(tree, list):
        return [swapped(item, kind, get) for item in tree]
    if isinstance(tree, dict):
        return {key: swapped(item, kind, get) for key, item in tree.items()}
    return tree


def hashable(
    tree: Any, kind: type[Leaf] | tuple[type[Leaf], ...], get: Callable[[Leaf], Hashable]
) -> Hashable:
    """A hashable form, equal for equal trees, with `get(leaf)` for leaves of `kind`."""
    if isinstance(tree, kind):
        return get(tree)
    if isinstance(tree, list | tuple):
        return tuple([hashable(item, kind, get) for item in tree])
    if isinstance(tree, Mapping):
        return tuple([(key, hashable(item, kind, get)) for key, item in tree.items()])
    # 1, 1.0 and True are equal, but they differ to an operation.
    return type(tree), tree
