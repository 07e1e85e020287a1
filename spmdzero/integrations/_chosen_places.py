"""Replaces a mask that chooses elements by the indices of the chosen elements.

The number of chosen elements depends on the mask's values, so no compiled program knows the shape.
The host reads the mask and passes indices, whose number is that shape; the elements and their
gradients stay on the devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_INDEXING = frozenset(
    getattr(_aten, name).default
    for name in ("index_put", "index_put_", "_index_put_impl", "_index_put_impl_")
) | {_aten.index.Tensor}


def by_places(func: Any, args: Sequence[Any], read: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The operation and its arguments, with indices in place of masks.

    Args:
        func: an operation of torch.
        args: its arguments.
        read: returns a mask's value on the CPU.
    """
    if func in (_aten.masked_select.default, _aten.masked_scatter.default):
        tensor, mask, *source = args
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        mask = read(mask).expand(shape)
        # `source` may have more elements than are chosen; torch ignores them too.
        values = [more.flatten()[: int(mask.sum())] for more in source]
        func = _aten.index_put.default if values else _aten.index.Tensor
        args = (tensor.expand(shape), [mask], *values)
    if func not in _INDEXING or not any(map(_is_mask, args[1])):
        return func, args
    places: list[Any] = []
    for index in args[1]:
        # A mask of several dims becomes one index per dim.
        places += read(index).nonzero(as_tuple=True) if _is_mask(index) else [index]
    return func, (args[0], places, *args[2:])


def _is_mask(index: Any) -> bool:
    # A mask without dims chooses all or nothing, and has no indices.
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS and index.dim() > 0
