"""Upsampling by the nearest element or by interpolation, padding by repetition; their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import lowers
from spmdzero.backend.jax.ops.pooling import mapped

_ONE = np.float32(1)


def _step(length: int, count: int, align: bool, scale: float | None) -> Any:
    """The distance in the source per output, in float32 as in torch's kernels."""
    if align:
        return np.float32(length - 1) / np.float32(count - 1) if count > 1 else np.float32(0)
    if scale is not None and scale > 0:
        return np.float32(1.0 / scale)
    return np.float32(length) / np.float32(count)


def _nearest(length: int, count: int, scale: float | None, exact: bool) -> Any:
    places = np.arange(count, dtype=np.float32) + (np.float32(0.5) if exact else np.float32(0))
    source = np.floor(places * _step(length, count, False, scale)).astype(np.int64)
    return np.minimum(source, length - 1)


def _taken(x: Any, tables: Any) -> Any:
    for d, table in enumerate(tables, x.ndim - len(tables)):
        x = jnp.take(x, jnp.asarray(table), d)
    return x


def _linear(length: int, count: int, align: bool, scale: float | None) -> Any:
    step, places = _step(length, count, align, scale), np.arange(count, dtype=np.float32)
    half = np.float32(0.5)
    source = places * step if align else np.maximum(step * (places + half) - half, 0)
    low = np.minimum(source.astype(np.int64), length - 1)
    part = np.clip(source - low, 0, 1).astype(np.float32)
    matrix = np.zeros((count, length), np.float32)
    np.add.at(matrix, (np.arange(count), low), _ONE - part)
    np.add.at(matrix, (np.arange(count), np.minimum(low + 1, length - 1)), part)
    return matrix


def _cubic(length: int, count: int, align: bool, scale: float | None) -> Any:
    step, places = _step(length, count, align, scale), np.arange(count, dtype=np.float32)
    half, a = np.float32(0.5), np.float32(-0.75)
    source = places * step if align else step * (places + half) - half
    low = np.floor(source).astype(np.int64)
    part = (source - low).astype(np.float32)

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    weights = (far(part + 1), near(part), near(1 - part), far(2 - part))
    matrix = np.zeros((count, length), np.float32)
    for shift, weight in zip((-1, 0, 1, 2), weights, strict=True):
        np.add.at(matrix, (np.arange(count), np.clip(low + shift, 0, length - 1)), weight)
    return matrix


def _smooth(
    length: int, count: int, align: bool, scale: float | None, size: int, near: Callable[[Any], Any]
) -> Any:
    """Weights of windows as wide as the step between outputs, which average inputs."""
    step, half = _step(length, count, align, scale), np.float32(0.5)
    support = np.float32(size) * half * max(step, _ONE)
    matrix = np.zeros((count, length), np.float32)
    for row in range(count):
        center = step * (np.float32(row) + half)
        low = max(int(center - support + half), 0)
        places = np.arange(low, min(int(center + support + half), length))
        distance = (places.astype(np.float32) - center + half) / max(step, _ONE)
        weights = near(np.abs(distance)).astype(np.float32)
        total = weights.sum()
        matrix[row, places] = weights / total if total else weights
    return matrix


def _smooth_linear(length: int, count: int, align: bool, scale: float | None) -> Any:
    return _smooth(length, count, align, scale, 2, lambda x: np.maximum(1 - x, 0))


def _smooth_cubic(length: int, count: int, align: bool, scale: float | None) -> Any:
    a = np.float32(-0.5)

    def near(x: Any) -> Any:
        inner = ((a + 2) * x - (a + 3)) * x * x + 1
        outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return np.where(x < 1, inner, np.where(x < 2, outer, 0))

    return _smooth(length, count, align, scale, 4, near)


def _scales(scales: Any, dims: int) -> Any:
    return tuple(scales) + (None,) * (dims - len(scales))


def _enter_nearest(name: str, dims: int, exact: bool) -> None:
    def resized(x: Any, size: Any, scales: Any) -> Any:
        sizes = zip(x.shape[2:], size, _scales(scales, dims), strict=True)
        return _taken(x, [_nearest(n, count, scale, exact) for n, count, scale in sizes])

    @lowers(name)
    def upsample(self: Any, output_size: Any, *scales: Any) -> Any:
        return resized(self, output_size, scales)

    @lowers(f"{name}_backward")
    def backward(grad_output: Any, output_size: Any, input_size: Any, *scales: Any) -> Any:
        grad = wide(grad_output)
        return _pulled(lambda x: resized(x, output_size, scales), input_size, grad)


def _enter_interpolated(name: str, dims: int, matrix: Callable[..., Any]) -> None:
    def resized(x: Any, size: Any, align: bool, scales: Any) -> Any:
        sizes = zip(x.shape[2:], size, _scales(scales, dims), strict=True)
        return mapped(x, [matrix(n, count, align, scale) for n, count, scale in sizes])

    @lowers(name)
    def upsample(self: Any, output_size: Any, align_corners: bool, *scales: Any) -> Any:
        return resized(wide(self), output_size, align_corners, scales)

    @lowers(f"{name}_backward")
    def backward(
        grad_output: Any, output_size: Any, input_size: Any, align_corners: bool, *scales: Any
    ) -> Any:
        grad = wide(grad_output)
        return _pulled(lambda x: resized(x, output_size, align_corners, scales), input_size, grad)


def _pulled(function: Callable[[Any], Any], shape: Any, grad: Any) -> Any:
    """The gradient of a linear function, which is the same everywhere."""
    _, pull = jax.vjp(function, jnp.zeros(tuple(shape), grad.dtype))
    return pull(grad)[0]


def _repeated(x: Any, padding: Any) -> Any:
    dims = len(padding) // 2
    tables = []
    for d in range(dims):
        length, at = x.shape[x.ndim - dims + d], 2 * (dims - 1 - d)
        places = np.arange(-padding[at], length + padding[at + 1])
        tables.append(np.clip(places, 0, length - 1))
    return _taken(x, tables)


def _enter_replication(dims: int) -> None:
    @lowers(f"replication_pad{dims}d")
    def pad(self: Any, padding: Any) -> Any:
        return _repeated(self, padding)

    @lowers(f"replication_pad{dims}d_backward")
    def backward(grad_output: Any, self: Any, padding: Any) -> Any:
        return _pulled(lambda x: _repeated(x, padding), self.shape, wide(grad_output))


for _dims in (1, 2, 3):
    _enter_nearest(f"upsample_nearest{_dims}d", _dims, False)
    _enter_nearest(f"_upsample_nearest_exact{_dims}d", _dims, True)
    _enter_replication(_dims)
_enter_interpolated("upsample_linear1d", 1, _linear)
_enter_interpolated("upsample_bilinear2d", 2, _linear)
_enter_interpolated("upsample_trilinear3d", 3, _linear)
_enter_interpolated("upsample_bicubic2d", 2, _cubic)
_enter_interpolated("_upsample_bilinear2d_aa", 2, _smooth_linear)
_enter_interpolated("_upsample_bicubic2d_aa", 2, _smooth_cubic)
