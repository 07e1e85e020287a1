"""Diagonals of two dims that aren't the last ones: torch_xla would take those of the last ones."""

import functools
from typing import Any

import torch

from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


@functools.cache
def mend_diagonals() -> None:
    """Makes reads and writes of diagonals move these dims to the end first."""
    wrap_kernel("diagonal_copy", _read)
    wrap_kernel("diagonal_scatter", _written)


def _read(kernel: Kernel) -> Kernel:
    def diagonal(
        keys: Any, tensor: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
    ) -> Any:
        moved = _turned(tensor, _order(tensor, dim1, dim2))
        return kernel(keys, moved, offset, moved.dim() - 2, moved.dim() - 1)

    return diagonal


def _written(kernel: Kernel) -> Kernel:
    def diagonal(
        keys: Any,
        tensor: torch.Tensor,
        source: torch.Tensor,
        offset: int = 0,
        dim1: int = 0,
        dim2: int = 1,
    ) -> Any:
        if not source.numel():
            # torch_xla has a separate program for this case, which XLA refuses.
            return torch.ops.aten.clone.default(tensor)
        order = _order(tensor, dim1, dim2)
        moved = _turned(tensor, order)
        made = kernel(keys, moved, source, offset, moved.dim() - 2, moved.dim() - 1)
        return _turned(made, [order.index(dim) for dim in range(len(order))])

    return diagonal


# torch wouldn't know that torch_xla's own view is one: after a write in place it would be stale.
_turned = torch.ops.aten.permute_copy.default


def _order(tensor: torch.Tensor, *last: int) -> list[int]:
    """The tensor's dims, with these two at the end."""
    ends = [dim % tensor.dim() for dim in last]
    return [dim for dim in range(tensor.dim()) if dim not in ends] + ends
