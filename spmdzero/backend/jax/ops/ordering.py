"""Sorting, selecting by rank, searching and running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdzero.backend.jax.ops._dtypes import cast, common, dtype_of, is_inexact, wide, wide_float
from spmdzero.backend.jax.ops._shapes import axis
from spmdzero.backend.jax.ops._table import lowers


def _at_least_1d(
    function: Callable[..., Any], self: Any, dim: int, *options: Any, **named: Any
) -> Any:
    """Applies a function of arrays with dims to any array; a 0-dim array gives 0-dim results."""
    if self.ndim:
        return function(self, axis(dim, self.ndim), *options, **named)
    out = function(self[None], 0, *options, **named)
    return jax.tree.map(lambda x: x.reshape(()), out)


@lowers("sort")
def sort(self: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """The elements in order along a dim, NaN as the largest, and their former places."""

    def ordered(x: Any, d: int) -> tuple[Any, Any]:
        order = jnp.argsort(x, d, stable=True, descending=descending)
        return jnp.take_along_axis(x, order, d), order

    return _at_least_1d(ordered, self, dim)


@lowers("sort.stable")
def sort_stable(
    self: Any, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    """The same as `sort`, which is stable."""
    return sort(self, dim, descending)


@lowers("argsort", "argsort.stable")
def argsort(self: Any, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Any:
    """The former places of the sorted elements."""
    return sort(self, dim, descending)[1]


@lowers("topk")
def topk(
    self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Any, Any]:
    """The k largest or smallest elements along a dim, in order, and their places."""
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)

    place = axis(dim, self.ndim)
    if not largest or not is_inexact(dtype_of(self)):
        values, order = sort(self, dim, largest)
        return lax.slice_in_dim(values, 0, k, axis=place), lax.slice_in_dim(order, 0, k, axis=place)
    values, order = lax.top_k(jnp.moveaxis(self, place, -1), k)
    return jnp.moveaxis(values, -1, place), jnp.moveaxis(order, -1, place)


def _ranked(self: Any, dim: int, keepdim: bool, rank: Callable[[Any, int], Any]) -> Any:
    """The element of a rank along a dim, and its place; the rank may depend on the elements."""

    def picked(x: Any, d: int) -> tuple[Any, ...]:
        values, order = sort(x, d)
        at = rank(x, d)
        out = jnp.take_along_axis(values, at, d), jnp.take_along_axis(order, at, d)
        return out if keepdim or self.ndim == 0 else tuple(jnp.squeeze(v, d) for v in out)

    return _at_least_1d(picked, self, dim)


def _kept(x: Any, d: int) -> tuple[int, ...]:
    return tuple(1 if i == d else n for i, n in enumerate(x.shape))


@lowers("kthvalue")
def kthvalue(self: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The k-th smallest element along a dim, and its place."""
    return _ranked(self, dim, keepdim, lambda x, d: jnp.full(_kept(x, d), k - 1))


@lowers("median.dim")
def median_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower of the two middle elements along a dim; NaN if there is any."""

    def rank(x: Any, d: int) -> Any:
        length = x.shape[d]
        numbers = length - jnp.sum(x != x, d, keepdims=True)
        # NaNs are sorted last, and the first of them comes after the numbers.
        return jnp.where(numbers < length, numbers, (length - 1) // 2)

    return _ranked(self, dim, keepdim, rank)


@lowers("nanmedian.dim")
def nanmedian_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower of the two middle elements along a dim, without NaNs."""

    def rank(x: Any, d: int) -> Any:
        return jnp.maximum(x.shape[d] - jnp.sum(x != x, d, keepdims=True) - 1, 0) // 2

    return _ranked(self, dim, keepdim, rank)


@lowers("median")
def median(self: Any) -> Any:
    """The lower of the two middle elements of all; NaN if there is any."""
    return median_dim(self.reshape(-1), 0)[0]


@lowers("nanmedian")
def nanmedian(self: Any) -> Any:
    """The lower of the two middle elements of all, without NaNs."""
    return nanmedian_dim(self.reshape(-1), 0)[0]


@lowers("mode")
def mode(self: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The smallest of the most frequent elements along a dim, and its last place."""

    def rank(x: Any, d: int) -> Any:
        values = jnp.sort(x, d)
        # Counts the equal elements up to each place: the largest count ends the longest run.
        same = jnp.expand_dims(values, d + 1) == jnp.expand_dims(values, d)
        counts = jnp.sum(same, d + 1)
        first = jnp.argmax(counts, d, keepdims=True)
        return first + jnp.max(counts, d, keepdims=True) - 1

    return _ranked(self, dim, keepdim, rank)


@lowers("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """The places at which values would enter the sorted sequence, or each row its own sequence."""
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    rows, values = common(sorted_sequence, self)
    which = "right" if right or side == "right" else "left"
    if rows.ndim <= 1:
        out = jnp.searchsorted(rows, values, side=which)
    else:
        flat = jax.vmap(lambda row, value: jnp.searchsorted(row, value, side=which))(
            rows.reshape(-1, rows.shape[-1]), values.reshape(-1, values.shape[-1])
        )
        out = flat.reshape(values.shape)
    return out.astype(jnp.int32 if out_int32 else jnp.int64)


@lowers("bucketize.Tensor", "bucketize.Scalar")
def bucketize(self: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """The bucket of each value."""
    return searchsorted(boundaries, self, out_int32=out_int32, right=right)


def _running(function: Callable[..., Any], self: Any, dim: int, dtype: Any) -> Any:
    if dtype is None and not is_inexact(dtype_of(self)):
        self = self.astype(jnp.int64)
    return _at_least_1d(function, wide(cast(self, dtype)), dim)


@lowers("cumsum")
def cumsum(self: Any, dim: int, *, dtype: Any = None) -> Any:
    """The sums up to each element."""
    return _running(jnp.cumsum, self, dim, dtype)


@lowers("cumprod")
def cumprod(self: Any, dim: int, *, dtype: Any = None) -> Any:
    """The products up to each element."""
    return _running(jnp.cumprod, self, dim, dtype)


@lowers("logcumsumexp")
def logcumsumexp(self: Any, dim: int) -> Any:
    """The logarithms of the sums of the exponentials up to each element."""
    x = wide_float(self)
    if jnp.iscomplexobj(x):
        return jnp.log(cumsum(jnp.exp(x), dim))
    return _at_least_1d(lax.cumlogsumexp, x, dim)


def _extremes(function: Callable[..., Any], self: Any, dim: int) -> tuple[Any, Any]:
    def both(x: Any, d: int) -> tuple[Any, Any]:
        number = x.astype(jnp.int8) if x.dtype == bool else x
        values = function(number, d).astype(x.dtype)
        places = lax.broadcasted_iota(jnp.int64, x.shape, d)
        hit = (x == values) | (x != x)
        return values, lax.cummax(jnp.where(hit, places, 0), d)

    return _at_least_1d(both, self, dim)


@lowers("cummax")
def cummax(self: Any, dim: int) -> tuple[Any, Any]:
    """The largest element up to each place, and its last place."""
    return _extremes(lax.cummax, self, dim)


@lowers("cummin")
def cummin(self: Any, dim: int) -> tuple[Any, Any]:
    """The smallest element up to each place, and its last place."""
    return _extremes(lax.cummin, self, dim)
