"""Elements that a client's code chooses by a mask, as the places of them.

How many they are is in the mask, so no compiled program can say the shape. The host reads the mask
and hands over numbers, whose count is that shape: the elements stay on the devices, gradients too.
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
    """The operation and its arguments, with places where there were masks.

    Args:
        func: an operation of torch's.
        args: its arguments.
        read: gives a mask on the CPU, wherever it is.
    """
    if func in (_aten.masked_select.default, _aten.masked_scatter.default):
        tensor, mask, *source = args
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        mask = read(mask).expand(shape)
        # What `source` has beyond the chosen elements is left over, in torch too.
        values = [more.flatten()[: int(mask.sum())] for more in source]
        func = _aten.index_put.default if values else _aten.index.Tensor
        args = (tensor.expand(shape), [mask], *values)
    if func not in _INDEXING or not any(map(_is_mask, args[1])):
        return func, args
    places: list[Any] = []
    for index in args[1]:
        # A mask of several dims stands for an index of each of them.
        places += read(index).nonzero(as_tuple=True) if _is_mask(index) else [index]
    return func, (args[0], places, *args[2:])


def _is_mask(index: Any) -> bool:
    # One without dims chooses all or nothing, and has no place.
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS and index.dim() > 0
