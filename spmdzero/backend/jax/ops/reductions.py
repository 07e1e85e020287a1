"""Sums, extremes and the other reductions; half precision is summed in float32."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax.ops._dtypes import (
    cast,
    dtype_of,
    is_inexact,
    wide,
    wide_float,
)
from spmdzero.backend.jax.ops._shapes import axes, axis
from spmdzero.backend.jax.ops._table import lowers


def _summand(self: Any, dtype: Any) -> Any:
    """The operand of a sum or product in the dtype asked for, integers in 64 bits."""
    if dtype is not None:
        return wide(cast(self, dtype))
    return wide(self) if is_inexact(dtype_of(self)) else self.astype(jnp.int64)


@lowers("sum", "sum.dim_IntList")
def sum_(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum over the dims."""
    return jnp.sum(_summand(self, dtype), axes(dim, self.ndim), keepdims=keepdim)


@lowers("prod", "prod.dim_int")
def prod(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The product over a dim, or over all."""
    return jnp.prod(_summand(self, dtype), axes(dim, self.ndim), keepdims=keepdim)


@lowers("mean", "mean.dim")
def mean(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The mean over the dims."""
    return jnp.mean(wide(cast(self, dtype)), axes(dim, self.ndim), keepdims=keepdim)


@lowers("amax")
def amax(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """The largest element over the dims; NaN wins."""
    return jnp.max(self, axes(dim, self.ndim), keepdims=keepdim)


@lowers("amin")
def amin(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """The smallest element over the dims; NaN wins."""
    return jnp.min(self, axes(dim, self.ndim), keepdims=keepdim)


@lowers("max", "max.dim")
def max_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest element of all, or along a dim with its index."""
    values = jnp.max(self, axes(dim, self.ndim), keepdims=keepdim)
    return values if dim is None else (values, argmax(self, dim, keepdim))


@lowers("min", "min.dim")
def min_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The smallest element of all, or along a dim with its index."""
    values = jnp.min(self, axes(dim, self.ndim), keepdims=keepdim)
    return values if dim is None else (values, argmin(self, dim, keepdim))


def _index(function: Any, self: Any, dim: int | None, keepdim: bool) -> Any:
    if self.ndim == 0:
        return jnp.zeros((), jnp.int64)
    if dim is None:
        return function(self.reshape(-1)).reshape((1,) * self.ndim if keepdim else ())
    return function(self, axis(dim, self.ndim), keepdims=keepdim)


@lowers("argmax")
def argmax(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The first index of the largest element."""
    return _index(jnp.argmax, self, dim, keepdim).astype(jnp.int64)


@lowers("argmin")
def argmin(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The first index of the smallest element."""
    return _index(jnp.argmin, self, dim, keepdim).astype(jnp.int64)


def _is_empty(dim: Any) -> bool:
    return isinstance(dim, list | tuple) and not dim


@lowers("any", "any.dim", "any.dims", "_is_any_true")
def any_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Whether any element is not 0; an empty list of dims reduces none, unlike that of a sum."""
    if _is_empty(dim):
        return self != 0
    return jnp.any(self != 0, axes(dim, self.ndim), keepdims=keepdim)


@lowers("all", "all.dim", "all.dims", "_is_all_true")
def all_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Whether no element is 0; an empty list of dims reduces none."""
    if _is_empty(dim):
        return self != 0
    return jnp.all(self != 0, axes(dim, self.ndim), keepdims=keepdim)


@lowers("var_mean.correction")
def var_mean(
    self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """The variance over the dims, and the mean."""
    x, dims = wide_float(self), axes(dim, self.ndim)
    count = math.prod(x.shape[d] for d in dims)
    center = jnp.mean(x, dims, keepdims=True)
    squares = jnp.square(jnp.abs(x - center))
    # torch divides by 0, not by a negative number, where the correction exceeds the count.
    divisor = jnp.asarray(max(0, count - (1 if correction is None else correction)), squares.dtype)
    variance = jnp.sum(squares, dims, keepdims=keepdim) / divisor
    return variance, center if keepdim else jnp.squeeze(center, dims)


@lowers("var.correction")
def var(self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The variance over the dims."""
    return var_mean(self, dim, correction=correction, keepdim=keepdim)[0]


@lowers("std.correction")
def std(self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The standard deviation over the dims."""
    return jnp.sqrt(var(self, dim, correction=correction, keepdim=keepdim))


@lowers("logsumexp")
def logsumexp(self: Any, dim: Any, keepdim: bool = False) -> Any:
    """The logarithm of the sum of the exponentials."""
    x, dims = wide_float(self), axes(dim, self.ndim)
    top = jnp.max(jnp.real(x), dims, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.abs(top) == jnp.inf, 0, top)
    out = jnp.log(jnp.sum(jnp.exp(x - top), dims, keepdims=True)) + top
    return out if keepdim else jnp.squeeze(out, dims)


@lowers("linalg_vector_norm")
def vector_norm(
    self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The norm of this order over the dims."""
    x, dims = wide_float(cast(self, dtype)), axes(dim, self.ndim)
    size = jnp.abs(x)
    if ord == math.inf:
        return jnp.max(size, dims, keepdims=keepdim, initial=0)
    if ord == -math.inf:
        return jnp.min(size, dims, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(size != 0, dims, keepdims=keepdim).astype(size.dtype)
    if ord == 1:
        return jnp.sum(size, dims, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(size), dims, keepdims=keepdim))
    power = jnp.asarray(ord, size.dtype)
    return jnp.power(jnp.sum(jnp.power(size, power), dims, keepdims=keepdim), 1 / power)


@lowers("value_selecting_reduction_backward")
def value_selecting_reduction_backward(
    grad: Any, dim: int, indices: Any, sizes: Any, keepdim: bool
) -> Any:
    """The gradient at the elements that were selected, else 0."""
    if not sizes:
        return grad
    place = axis(dim, len(sizes))
    if not keepdim:
        grad, indices = jnp.expand_dims(grad, place), jnp.expand_dims(indices, place)
    hit = jnp.arange(sizes[place]).reshape((-1,) + (1,) * (len(sizes) - 1 - place)) == indices
    return jnp.where(hit, grad, 0)
