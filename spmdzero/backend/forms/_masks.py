"""Indexing by masks as indexing by the places that they choose."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_INDEXING = frozenset(
    getattr(_aten, name).default
    for name in ("index_put", "index_put_", "_index_put_impl", "_index_put_impl_")
) | {_aten.index.Tensor}
_BY_ONE_MASK = frozenset({_aten.masked_select.default, _aten.masked_scatter.default})


def is_mask(index: Any) -> bool:
    """Whether an index chooses elements by true and false, and not by their numbers."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def has_masks(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation indexes by a mask."""
    return func in _INDEXING and any(map(is_mask, args[1]))


def by_places(
    func: Any,
    args: tuple[Any, ...],
    places: Callable[[torch.Tensor, torch.Size], Iterable[torch.Tensor]],
) -> tuple[Any, tuple[Any, ...]]:
    """The operation and its arguments, with indices in the place of masks.

    Args:
        func: an operation of torch, not necessarily one by masks.
        args: its arguments. A mask without dims, which chooses all or nothing, stays.
        places: maps a mask, and the shape that it is expanded to, to the indices of what it
            chooses, a tensor for each dim.
    """
    if func in _BY_ONE_MASK:
        tensor, mask, *source = args
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        chosen = [*places(mask, shape)]
        # `source` may have more elements than are chosen; torch ignores them too.
        values = [more.flatten()[: len(chosen[0])] for more in source]
        func = _aten.index_put.default if values else _aten.index.Tensor
        return func, (tensor.expand(shape), chosen, *values)
    if not has_masks(func, args):
        return func, args
    indices: list[Any] = []
    for index in args[1]:
        # A mask of several dims becomes one index per dim.
        chooses = is_mask(index) and index.dim() > 0
        indices += places(index, index.shape) if chooses else [index]
    return func, (args[0], indices, *args[2:])
