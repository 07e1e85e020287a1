"""Walks nested containers of tensors, or of whatever stands for tensors: the one walk there is.

Containers are lists, tuples and mappings, their subclasses (named tuples, transformers' outputs and
encodings) and dataclasses; `map_tensors` enters the attributes of other objects too. What is
looked for is found before it is looked into, so a container may be a leaf.
"""

import collections
import copy
import dataclasses
import enum
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

Leaf = TypeVar("Leaf")
Kind = type[Leaf] | tuple[type[Leaf], ...]

_VALUES = (
    *(str, bytes, int, float, complex, bool, type(None), enum.Enum),
    *(torch.device, torch.dtype, torch.layout, torch.memory_format, torch.Size),
)
# Most values are of exactly these classes, which are found sooner in a set than by `isinstance`.
_PLAIN = frozenset({*_VALUES} - {enum.Enum})
_EXACT = _PLAIN - {float, complex}
_CLOSED = (*_VALUES, torch.Tensor, nn.Module, type)


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


TENSORS = (torch.Tensor, Replicated, Batch)


def replicated(tensor: torch.Tensor) -> Replicated:
    """Declares that every replica receives `tensor` whole.

    An input whose dim 0 has as many rows as the micro-batch enters the replica region as a
    batch shard. `engine(x, spmdzero.replicated(table))` says that `table` only looks like one.
    """
    return Replicated(tensor)


class UnknownContentError(TypeError):
    """Raised for an object whose content can't be compared; the message starts with its class."""


def found(tree: Any, kind: Kind[Leaf]) -> list[Leaf]:
    """The leaves of class `kind`, in order."""
    leaves: list[Leaf] = []
    _collect(tree, kind, leaves)
    return leaves


def _collect(tree: Any, kind: Kind[Leaf], leaves: list[Leaf]) -> None:
    if isinstance(tree, kind):
        leaves.append(tree)
        return
    cls = type(tree)
    if cls is tuple or cls is list:
        for item in tree:
            _collect(item, kind, leaves)
    elif cls is dict:
        for item in tree.values():
            _collect(item, kind, leaves)
    elif cls not in _PLAIN and (opened := _opened(tree)) is not None:
        for item in opened[1]:
            _collect(item, kind, leaves)


def mapped(
    tree: Any,
    kind: Kind[Leaf],
    get: Callable[[Leaf], Any],
    unknown: Callable[[Any], Any] | None = None,
) -> Any:
    """A copy of `tree` with `get(leaf)` for leaves of `kind`; it has lists and dicts of its own.

    A container of another class is returned itself if nothing in it changes.

    Args:
        tree: the containers and leaves.
        kind: the class of the leaves.
        get: takes a leaf; returns what takes its place.
        unknown: does the same for what is neither leaf, container nor plain value.
    """
    if isinstance(tree, kind):
        return get(tree)
    cls = type(tree)
    if cls is tuple:
        return tuple([mapped(item, kind, get, unknown) for item in tree])
    if cls is list:
        return [mapped(item, kind, get, unknown) for item in tree]
    if cls in _PLAIN:
        return tree
    if cls is dict:
        return {key: mapped(item, kind, get, unknown) for key, item in tree.items()}
    opened = _opened(tree)
    if opened is None:
        return tree if unknown is None or isinstance(tree, _VALUES) else unknown(tree)
    return _again(tree, opened, [mapped(item, kind, get, unknown) for item in opened[1]])


def map_tensors(tree: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of `tree` with `function(path, tensor)` for each tensor, `Replicated` and `Batch`.

    It walks as `mapped` and, as the last resort, through the attributes of plain objects (a
    key-value cache). A container none of whose tensors changes is returned itself.
    """
    return _map(tree, function, path, frozenset())


def _map(tree: Any, function: Callable[[str, Any], Any], path: str, inside: frozenset[int]) -> Any:
    if isinstance(tree, TENSORS):
        return function(path, tree)
    if type(tree) in _PLAIN or id(tree) in inside:
        return tree
    opened = _opened(tree) or _attributes(tree)
    if opened is None:
        return tree
    inside = inside | {id(tree)}
    start = f"{path}." if path else ""
    items = zip(*opened, strict=True)
    return _again(
        tree, opened, [_map(item, function, f"{start}{key}", inside) for key, item in items]
    )


def form_of(
    tree: Any,
    kind: Kind[Leaf],
    get: Callable[[Leaf], Hashable],
    unknown: Callable[[Any], Hashable] | None = None,
) -> Hashable:
    """A hashable form, equal for trees that differ in nothing but leaves of equal `get(leaf)`.

    It has the classes of containers and values: 1, 1.0 and True are equal, and so are 0.0 and -0.0,
    but they differ to an operation.

    Args:
        tree: the containers and leaves.
        kind: the class of the leaves.
        get: takes a leaf; returns its form.
        unknown: does the same for what is neither leaf, container nor plain value, which otherwise
            is equal to what it says it is equal to.

    Raises:
        UnknownContentError: a container has a leaf that is not one of its items.
    """
    if isinstance(tree, kind):
        return get(tree)
    cls = type(tree)
    if cls is tuple or cls is list:
        return cls, tuple([form_of(item, kind, get, unknown) for item in tree])
    if cls in _EXACT:
        return cls, tree
    if cls is dict:
        return cls, tuple([(key, form_of(item, kind, get, unknown)) for key, item in tree.items()])
    if isinstance(tree, float | complex):
        return cls, repr(tree)
    if isinstance(tree, _VALUES):
        return cls, tree
    opened = _opened(tree)
    if opened is None:
        return (cls, tree) if unknown is None else unknown(tree)
    keys, items = opened
    forms = tuple([form_of(item, kind, get, unknown) for item in items])
    return cls, tuple(keys), forms, _beside(tree, kind, unknown)


def refuse_unknown(value: Any) -> NoReturn:
    """Raises UnknownContentError, as `unknown` of `form_of`."""
    raise UnknownContentError(
        f"a {type(value).__name__}, whose content can't be compared between steps"
    )


class _Hole:
    """The place of a leaf; copies are the same object."""

    def __copy__(self) -> "_Hole":
        return self

    def __deepcopy__(self, _: Any) -> "_Hole":
        return self


_HOLE = _Hole()


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A tree without its tensors; equal to those of trees that differ in tensors only.

    Attributes:
        form: that of the tree.
    """

    form: Hashable
    _tree: Any = dataclasses.field(compare=False, repr=False)

    @classmethod
    def of(cls, tree: Any) -> tuple["Skeleton", list[torch.Tensor]]:
        """The skeleton of `tree`, and the tensors in their order.

        Raises:
            UnknownContentError: a part of `tree` is neither container, tensor nor plain value, or a
                container of the user's own class can't be copied.
        """
        known = form_of(tree, torch.Tensor, lambda _: torch.Tensor, refuse_unknown)
        tensors: list[torch.Tensor] = []

        def take(tensor: torch.Tensor) -> _Hole:
            tensors.append(tensor)
            return _HOLE

        holed = mapped(tree, torch.Tensor, take)
        try:
            return cls(known, copy.deepcopy(holed)), tensors
        except Exception as error:
            # A class of the user's may raise anything when it is copied.
            name = type(tree).__name__
            raise UnknownContentError(f"a {name} that can't be copied ({error})") from None

    def filled(self, tensors: Iterable[Any]) -> Any:
        """The tree with these tensors, in containers of its own."""
        left = iter(tensors)
        return mapped(copy.deepcopy(self._tree), _Hole, lambda _: next(left))


def _opened(tree: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """The keys of a container and its items; None for what is no container."""
    if isinstance(tree, _CLOSED):
        return None
    if isinstance(tree, Mapping):
        plain = dict(tree.items())
        return [*plain], [*plain.values()]
    if isinstance(tree, list | tuple):
        return range(len(tree)), tree
    if dataclasses.is_dataclass(tree):
        # A field may be set after the object was made.
        names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        return names, [getattr(tree, name) for name in names]
    return None


def _attributes(tree: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    own = None if isinstance(tree, _CLOSED) else getattr(tree, "__dict__", None)
    return ([*own], [*own.values()]) if own else None


def _again(tree: Any, opened: tuple[Sequence[Any], Sequence[Any]], made: list[Any]) -> Any:
    """`tree` with the items `made` in place of those that `_opened` or `_attributes` found."""
    keys, items = opened
    if all(map(operator.is_, made, items)):
        return tree
    cls, own = type(tree), getattr(tree, "__dict__", None)
    if cls is dict:
        return dict(zip(keys, made, strict=True))
    if isinstance(tree, tuple):
        copied: Any = cls._make(made) if hasattr(cls, "_fields") else cls(made)
        if own:
            vars(copied).update(own)
        return copied
    if isinstance(tree, list) and not own:
        return cls(made)
    if dataclasses.is_dataclass(cls) and issubclass(cls, Mapping):
        # transformers' outputs: mappings of the fields that are set.
        return dataclasses.replace(tree, **dict(zip(keys, made, strict=True)))
    copied = copy.copy(tree)
    if isinstance(tree, list):
        copied[:] = made
    elif isinstance(tree, Mapping):
        for key, item in zip(keys, made, strict=True):
            copied[key] = item
    elif dataclasses.is_dataclass(tree):
        for key, item in zip(keys, made, strict=True):
            # Its own way may be closed, as of a frozen one.
            object.__setattr__(copied, key, item)
    else:
        vars(copied).update(zip(keys, made, strict=True))
    return copied


def _beside(container: Any, kind: Kind[Leaf], unknown: Callable[[Any], Hashable] | None) -> Any:
    """The form of what a container holds beside its items, which a user's class may have."""
    own = {**getattr(container, "__dict__", {})}
    if dataclasses.is_dataclass(container):
        for field in dataclasses.fields(container):
            own.pop(field.name, None)
    elif isinstance(container, collections.UserDict):
        own.pop("data", None)

    def refuse(_: Any) -> NoReturn:
        raise UnknownContentError(
            f"a {type(container).__name__} with a tensor that is not one of its items"
        )

    return form_of(own, kind, refuse, unknown) if own else None


def device_types(tree: Any) -> set[str]:
    """The device types, such as ``"cpu"``, of the tensors in `tree` that have dims.

    A 0-dim tensor doesn't count: torch moves such a number by itself.
    """
    types: set[str] = set()

    def look(_: str, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.dim():
            types.add(tensor.device.type)
        return tensor

    map_tensors(tree, look)
    return types
