"""Pooling over windows and adaptive pooling, with their backward passes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdzero.backend.jax.ops._dtypes import dtype_of, is_inexact, wide
from spmdzero.backend.jax.ops._shapes import several
from spmdzero.backend.jax.ops._table import lowers


def _count(length: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    """Number of windows that torch takes from a dim."""
    span = length + 2 * pad - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= length + pad else count


def _least(like: Any) -> Any:
    return -jnp.inf if is_inexact(dtype_of(like)) else jnp.iinfo(like.dtype).min


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Windows:
    """Where the windows of a pool are, a number for each spatial dim.

    Attributes:
        kernel, stride, dilation: as torch's.
        pads: below and above.
        counts: of windows.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]


def _windows(
    spatial: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> _Windows:
    dims = len(spatial)
    kernel = several(kernel, dims)
    stride = several(stride, dims) if stride else kernel
    padding, dilation = several(padding, dims), several(dilation, dims)
    pads, counts = [], []
    for n, k, s, p, d in zip(spatial, kernel, stride, padding, dilation, strict=True):
        count = _count(n, k, s, p, d, ceil)
        counts.append(count)
        pads.append((p, max(0, (count - 1) * s + d * (k - 1) + 1 - n - p)))
    return _Windows(
        kernel=kernel, stride=stride, dilation=dilation, pads=tuple(pads), counts=tuple(counts)
    )


def _over(x: Any, windows: _Windows, start: Any, function: Any) -> Any:
    """Each window's elements and `start`, put together by one of `lax`'s functions."""
    front = x.ndim - len(windows.counts)
    result = lax.reduce_window(
        x,
        np.asarray(start, x.dtype)[()],
        function,
        (1,) * front + windows.kernel,
        (1,) * front + windows.stride,
        ((0, 0),) * front + windows.pads,
        window_dilation=(1,) * front + windows.dilation,
    )
    # Right padding below what ceil_mode needs can give one window more than torch takes.
    return result[(..., *(slice(n) for n in windows.counts))]


def _largest(x: Any, windows: _Windows) -> Any:
    return _over(x, windows, _least(x), lax.max)


def _places(x: Any, windows: _Windows) -> Any:
    """The places of the largest elements in the volume of their spatial dims."""
    spatial = x.shape[x.ndim - len(windows.counts) :]
    pads = [(0, 0)] * (x.ndim - len(spatial)) + list(windows.pads)
    padded = jnp.pad(x, pads, constant_values=_least(x))
    places = jnp.pad(
        jnp.arange(math.prod(spatial)).reshape(spatial), windows.pads, constant_values=-1
    )
    best: Any = None
    where: Any = None
    # One strided slice for each place in the window: XLA fuses all their comparisons.
    for offsets in itertools.product(*(range(k) for k in windows.kernel)):
        window = tuple(
            slice(o * d, o * d + (count - 1) * s + 1, s)
            for o, d, count, s in zip(
                offsets, windows.dilation, windows.counts, windows.stride, strict=True
            )
        )
        value, place = padded[(..., *window)], places[window]
        if best is None:
            best, where = value, jnp.broadcast_to(place, value.shape)
            continue
        # The padding is below everything, but an element may be -inf itself.
        better = (value > best) | (value != value) | ((where < 0) & (place >= 0))
        best, where = jnp.where(better, value, best), jnp.where(better, place, where)
    return where


def _max_pool(x: Any, dims: int, *options: Any) -> tuple[Any, Any]:
    windows = _windows(x.shape[-dims:], *options)
    # XLA leaves the places out where nobody asks for them, which take a TPU five times as long.
    return _largest(x, windows), _places(x, windows)


@lowers("max_pool2d_with_indices")
def max_pool2d(
    self: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Any, Any]:
    """The largest element of each window, and its place in the plane."""
    return _max_pool(self, 2, kernel_size, stride, padding, dilation, ceil_mode)


@lowers("max_pool3d_with_indices")
def max_pool3d(
    self: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Any, Any]:
    """The largest element of each window, and its place in the volume."""
    return _max_pool(self, 3, kernel_size, stride, padding, dilation, ceil_mode)


def _to_places(grad: Any, shape: Any, indices: Any, dims: int) -> Any:
    """The sums of the gradients at the places that were selected."""
    rows, size = math.prod(shape[:-dims]), math.prod(shape[-dims:])
    row = jnp.arange(rows)[:, None]
    where, grad = indices.reshape(rows, -1), wide(grad).reshape(rows, -1)
    return jnp.zeros((rows, size), grad.dtype).at[row, where].add(grad).reshape(shape)


@lowers("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(
    grad_output: Any,
    self: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """The gradient of the max pools; the kernel has as many numbers as they have dims.

    Where windows have no holes XLA selects the largest elements once more, instead of adding to the
    places that were selected: a TPU takes an element after the other for that.
    """
    dims = len(kernel_size)
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    windows = _windows(self.shape[-dims:], *options)
    if set(windows.dilation) != {1}:
        return _to_places(grad_output, self.shape, indices, dims)
    _, pull = jax.vjp(lambda x: _largest(x, windows), wide(self))
    return pull(wide(grad_output))[0]


def _avg_pool(
    x: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    include: bool,
    divisor: Any,
    dims: int,
) -> Any:
    spatial = x.shape[-dims:]
    windows = _windows(spatial, kernel, stride, padding, 1, ceil)
    area = np.ones((), np.int64)
    for n, count, k, s, (p, _) in zip(
        spatial, windows.counts, windows.kernel, windows.stride, windows.pads, strict=True
    ):
        start = np.arange(count) * s - p
        end = np.minimum(start + k, n + p)
        if not include:
            start, end = np.maximum(start, 0), np.minimum(end, n)
        area = area[..., None] * (end - start)
    total = _over(x, windows, 0, lax.add)
    return total / (jnp.asarray(area, x.dtype) if divisor is None else divisor)


def _enter_avg_pool(dims: int) -> None:
    @lowers(f"avg_pool{dims}d")
    def avg_pool(
        self: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Any = None,
    ) -> Any:
        options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return _avg_pool(wide(self), *options, dims=dims)

    @lowers(f"avg_pool{dims}d_backward")
    def avg_pool_backward(grad_output: Any, self: Any, *options: Any) -> Any:
        _, pull = jax.vjp(lambda x: _avg_pool(x, *options, dims=dims), wide(self))
        return pull(wide(grad_output))[0]


def _bounds(length: int, count: int) -> list[tuple[int, int]]:
    """The start and end of each adaptive window."""
    return [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]


def mapped(x: Any, matrices: Any) -> Any:
    """Applies a matrix to each of the last dims."""
    for d, matrix in enumerate(matrices, x.ndim - len(matrices)):
        matrix = jnp.asarray(matrix, x.dtype)
        out = lax.dot_general(x, matrix, (((d,), (1,)), ((), ())), lax.Precision.HIGHEST)
        x = jnp.moveaxis(out, -1, d)
    return x


def _means(length: int, count: int) -> Any:
    matrix = np.zeros((count, length))
    for i, (start, end) in enumerate(_bounds(length, count)):
        matrix[i, start:end] = 1 / (end - start)
    return matrix


def _adaptive_max(x: Any, size: Any) -> tuple[Any, Any]:
    dims = len(size)
    spatial = x.shape[-dims:]
    windows = [_bounds(n, count) for n, count in zip(spatial, size, strict=True)]
    groups = []
    for chosen in itertools.product(*windows):
        grid = np.meshgrid(*(np.arange(a, b) for a, b in chosen), indexing="ij")
        groups.append(np.ravel_multi_index([g.ravel() for g in grid], spatial))
    longest = max((len(g) for g in groups), default=1)
    # A short window repeats its last place.
    table = np.stack([np.pad(g, (0, longest - len(g)), mode="edge") for g in groups])
    values = x.reshape(*x.shape[:-dims], -1)[..., table]
    pick = jnp.argmax(values, -1)
    where = jnp.asarray(table)[jnp.arange(len(groups)), pick]
    shape = (*x.shape[:-dims], *size)
    return jnp.max(values, -1).reshape(shape), where.reshape(shape)


def _enter_adaptive(dims: int) -> None:
    @lowers(f"_adaptive_avg_pool{dims}d")
    def avg(self: Any, output_size: Any) -> Any:
        sizes = zip(self.shape[-dims:], output_size, strict=True)
        return mapped(wide(self), [_means(n, count) for n, count in sizes])

    @lowers(f"_adaptive_avg_pool{dims}d_backward")
    def avg_backward(grad_output: Any, self: Any) -> Any:
        sizes = zip(self.shape[-dims:], grad_output.shape[-dims:], strict=True)
        return mapped(wide(grad_output), [_means(n, count).T for n, count in sizes])

    @lowers(f"adaptive_max_pool{dims}d")
    def top(self: Any, output_size: Any) -> tuple[Any, Any]:
        return _adaptive_max(self, tuple(output_size))

    @lowers(f"adaptive_max_pool{dims}d_backward")
    def top_backward(grad_output: Any, self: Any, indices: Any) -> Any:
        return _to_places(grad_output, self.shape, indices, dims)


for _dims in (2, 3):
    _enter_avg_pool(_dims)
    _enter_adaptive(_dims)
