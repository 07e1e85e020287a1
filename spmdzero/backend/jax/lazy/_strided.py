"""`as_strided`, which reads a tensor's storage, for tensors that have none."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend.jax.lazy._cells import Cell
from spmdzero.backend.jax.lazy._dispatch import meta_result, special
from spmdzero.backend.jax.lazy._tensor import LazyTensor, become
from spmdzero.backend.jax.lazy._views import ViewStep
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
    steps = _to_storage(tensor)
    count = math.prod(steps[-1].after) if steps else math.prod(tensor.cell.value.shape)
    args = ([*size], [*stride], offset)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= count:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: as_strided asks for element number {last} of a storage of "
            f"{count}. Ask for fewer"
        )
    whole = torch.empty(count, dtype=tensor.dtype, device="meta")
    like = meta_result(_aten.as_strided.default, (whole, *args), {})
    steps.append(_step(_aten.as_strided.default, args, (count,), tuple(size), tensor.dtype))
    # Conjugation and negation of a view are flags of the tensor in torch, and stay.
    for flag in (_aten._conj.default, _aten._neg_view.default):
        if sum(step.func is flag for step in tensor.steps) % 2:
            steps.append(_step(flag, (), tuple(size), tuple(size), tensor.dtype))
    return LazyTensor(tensor.cell, tuple(steps), like)


def _step(func: Any, args: Any, before: Any, after: Any, dtype: torch.dtype) -> ViewStep:
    return ViewStep(func, args, {}, None, tuple(before), tuple(after), dtype)


def _to_storage(tensor: LazyTensor) -> list[ViewStep]:
    """The steps from the value of a tensor's cell to its storage, `[elements]` of its dtype."""
    order, held = _storage_order(tensor.cell), tensor.cell.value
    shape, dtype = tuple(held.shape[dim] for dim in order), held.dtype
    steps: list[ViewStep] = []
    if order != sorted(order):
        steps.append(_step(_aten.permute.default, (order,), held.shape, shape, dtype))
    if len(shape) != 1:
        flat = (math.prod(shape),)
        steps.append(_step(_aten.view.default, ([*flat],), shape, flat, dtype))
        shape = flat
    if dtype.is_complex and not tensor.is_complex():
        pairs, dtype = (*shape, 2), dtype.to_real()
        steps.append(_step(_aten.view_as_real.default, (), shape, pairs, held.dtype))
        shape = (math.prod(pairs),)
        steps.append(_step(_aten.view.default, ([*shape],), pairs, shape, dtype))
    elif tensor.is_complex() and not dtype.is_complex:
        pairs = (shape[0] // 2, 2)
        steps.append(_step(_aten.view.default, ([*pairs],), shape, pairs, dtype))
        shape = pairs[:1]
        steps.append(_step(_aten.view_as_complex.default, (), pairs, shape, dtype))
        dtype = tensor.dtype
    if dtype != tensor.dtype:
        after = (shape[0] * dtype.itemsize // tensor.dtype.itemsize,)
        steps.append(_step(_aten.view.dtype, (tensor.dtype,), shape, after, dtype))
    return steps


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


@special(_aten.resize_.default)
def _resize(tensor: LazyTensor, size: Sequence[int], **_: Any) -> torch.Tensor:
    if tensor.steps or math.prod(size) > tensor.numel():
        raise SpmdZeroRuntimeError(
            f"{user_line()}: resize_ to {list(size)} asks for more memory than a tensor of shape "
            f"{list(tensor.shape)} on the JAX backend has. Make a new tensor"
        )
    stride = torch.empty(tuple(size), device="meta").stride()
    become(tensor, _as_strided(tensor, size, stride))  # type: ignore[arg-type]
    return tensor


def _storage_order(cell: Cell) -> list[int]:
    """The dims of a cell's value in the order of its storage, outermost first.

    Raises:
        SpmdZeroRuntimeError: the dims don't fill the storage.
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
