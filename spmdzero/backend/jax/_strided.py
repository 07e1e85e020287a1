"""`as_strided`, which sees the storage behind a tensor, of tensors that have none."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend.jax._cells import Cell
from spmdzero.backend.jax._dispatch import meta_result, special
from spmdzero.backend.jax._tensor import LazyTensor
from spmdzero.backend.jax._views import ViewStep
from spmdzero.errors import SpmdZeroRuntimeError

_aten = torch.ops.aten


@special(_aten.as_strided.default)
def _as_strided(
    tensor: LazyTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    order, value = _storage_order(tensor.cell), tensor.cell.value
    shape = tuple(value.shape[dim] for dim in order)
    args = ([*size], [*stride], offset)
    count = math.prod(value.shape)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= count:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: as_strided asks for element number {last} of a storage of "
            f"{count}. Ask for fewer"
        )
    whole = torch.empty(shape, dtype=value.dtype, device="meta")
    like = meta_result(_aten.as_strided.default, (whole, *args), {})
    steps: list[ViewStep] = []
    if order != sorted(order):
        steps.append(
            ViewStep(_aten.permute.default, (order,), {}, None, value.shape, shape, value.dtype)
        )
    steps.append(
        ViewStep(_aten.as_strided.default, args, {}, None, shape, tuple(size), value.dtype)
    )
    return LazyTensor(tensor.cell, tuple(steps), like)


@special(_aten.as_strided_copy.default)
def _as_strided_copy(tensor: LazyTensor, *args: Any) -> torch.Tensor:
    return _as_strided(tensor, *args).clone(memory_format=torch.contiguous_format)


@special(_aten.as_strided_scatter.default)
def _as_strided_scatter(tensor: LazyTensor, source: torch.Tensor, *args: Any) -> torch.Tensor:
    size, stride = args[:2]
    offset = args[2] if len(args) > 2 and args[2] is not None else tensor.storage_offset()
    whole = tensor.clone()
    _as_strided(whole, size, stride, offset).copy_(source)
    return whole


def _storage_order(cell: Cell) -> list[int]:
    """The dims of what a cell holds as they lie in its storage, outermost first.

    Raises:
        SpmdZeroRuntimeError: they don't fill it.
    """
    shape = cell.value.shape
    stride = torch.empty(shape, device="meta").stride() if cell.stride is None else cell.stride
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim]))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != expected and 0 not in shape:
            raise SpmdZeroRuntimeError(
                f"{user_line()}: as_strided of a tensor whose storage has other elements too is "
                "not known to the JAX backend. Call .contiguous() first"
            )
        expected *= shape[dim]
    return order
