"""Writes into a part of an array: the scatters of views, and the views' backward passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmdzero.backend.jax.ops._dtypes import dtype_of, jax_dtype, math_dtype
from spmdzero.backend.jax.ops._shapes import at, axis, clipped
from spmdzero.backend.jax.ops._table import UnsupportedError, lowers
from spmdzero.backend.jax.ops.views import diagonal, unfold


@lowers("select_scatter")
def select_scatter(self: Any, src: Any, dim: int, index: int) -> Any:
    """self with src written at one index of a dim."""
    dim = axis(dim, self.ndim)
    shape = (*self.shape[:dim], 1, *self.shape[dim + 1 :])
    return _written(self, src.reshape(shape), dim, range(self.shape[dim])[index])


@lowers("slice_scatter")
def slice_scatter(
    self: Any,
    src: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """self with src written into a part of a dim."""
    dim = axis(dim, self.ndim)
    low, high = clipped(start, end, self.shape[dim])
    if step == 1:
        shape = (*self.shape[:dim], max(high - low, 0), *self.shape[dim + 1 :])
        return _written(self, jnp.broadcast_to(src, shape), dim, low)
    return self.at[at(dim, self.ndim, slice(low, high, step))].set(src.astype(self.dtype))


def _written(self: Any, part: Any, dim: int, start: int) -> Any:
    # XLA splits two scatters that follow each other wrongly if the first one's window has several
    # rows of a split dim: on each device but the first the second one writes into row 0 as well.
    return jax.lax.dynamic_update_slice_in_dim(self, part.astype(self.dtype), start, dim)


def _places(shape: Any) -> Any:
    size = 1
    for n in shape:
        size *= n
    return jnp.arange(size).reshape(shape)


@lowers("diagonal_scatter")
def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """self with src written on a diagonal."""
    where = diagonal(_places(self.shape), offset, dim1, dim2)
    return self.reshape(-1).at[where].set(src.astype(self.dtype)).reshape(self.shape)


def _strided(size: Any, stride: Any, offset: int | None, length: int) -> Any:
    """The places, in a storage of this length, of an array with these sizes and strides."""
    last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= length:
        # JAX would silently take another element.
        raise UnsupportedError(
            f"its last element is number {last} of a storage of {length}", "Ask for fewer"
        )
    where = jnp.asarray(offset or 0)
    for n, step in zip(size, stride, strict=True):
        where = where[..., None] + jnp.arange(n) * step
    return where


@lowers("as_strided", "as_strided_copy")
def as_strided(self: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """The elements at these places of the storage, which consists of self's elements in order.

    For a tensor that is not contiguous, or that is part of a storage, self must be the array of
    the whole storage: an array has no strides.
    """
    flat, expected, offset = self.reshape(-1), 1, storage_offset or 0
    contiguous = True
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        contiguous = contiguous and (n == 1 or step == expected)
        expected *= n
    if contiguous and offset + expected <= self.size:
        return flat[offset : offset + expected].reshape(tuple(size))
    return flat[_strided(size, stride, offset, self.size)]


@lowers("as_strided_scatter")
def as_strided_scatter(
    self: Any, src: Any, size: Any, stride: Any, storage_offset: int | None = None
) -> Any:
    """self, a storage as in `as_strided`, with src written at these places."""
    where = _strided(size, stride, storage_offset, self.size)
    return self.reshape(-1).at[where].set(src.astype(self.dtype)).reshape(self.shape)


@lowers("select_backward")
def select_backward(grad_output: Any, input_sizes: Any, dim: int, index: int) -> Any:
    """The gradient at the index, 0 elsewhere."""
    return select_scatter(_nothing(grad_output, input_sizes), grad_output, dim, index)


@lowers("slice_backward")
def slice_backward(
    grad_output: Any, input_sizes: Any, dim: int, start: int, end: int, step: int
) -> Any:
    """The gradient in the slice, 0 elsewhere."""
    return slice_scatter(_nothing(grad_output, input_sizes), grad_output, dim, start, end, step)


@lowers("diagonal_backward")
def diagonal_backward(grad_output: Any, input_sizes: Any, offset: int, dim1: int, dim2: int) -> Any:
    """The gradient on the diagonal, 0 elsewhere."""
    return diagonal_scatter(_nothing(grad_output, input_sizes), grad_output, offset, dim1, dim2)


@lowers("unfold_backward")
def unfold_backward(grad_in: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    """The gradients of the windows, summed where they overlap."""
    wide = jnp.zeros(input_sizes, jax_dtype(math_dtype(dtype_of(grad_in))))
    _, pull = jax.vjp(lambda x: unfold(x, dim, size, step), wide)
    return pull(grad_in.astype(wide.dtype))[0]


def _nothing(like: Any, sizes: Any) -> Any:
    return jnp.zeros(tuple(sizes), like.dtype)
