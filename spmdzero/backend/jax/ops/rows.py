"""Distances between a matrix's own rows; what a mask's elements are, of a fixed number."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import lowers


def _pairs(count: int) -> tuple[Any, Any]:
    return np.triu_indices(count, 1)


@lowers("_pdist_forward")
def pdist(self: Any, p: float = 2) -> Any:
    """The distance of each two rows."""
    one, other = _pairs(self.shape[0])
    size = jnp.abs(wide(self)[one] - wide(self)[other])
    if p == 0:
        return jnp.sum(size != 0, -1).astype(size.dtype)
    if p == math.inf:
        return jnp.max(size, -1, initial=0)
    if p == 1:
        return jnp.sum(size, -1)
    return jnp.sqrt(jnp.sum(size * size, -1)) if p == 2 else jnp.sum(size**p, -1) ** (1 / p)


@lowers("_pdist_backward")
def pdist_backward(grad: Any, self: Any, p: float, pdist: Any) -> Any:
    """The gradient of the rows: of two that are no distance apart 0."""
    one, other = _pairs(self.shape[0])
    x = wide(self)
    apart, given, far = x[one] - x[other], wide(grad)[:, None], wide(pdist)[:, None]
    if p == 0:
        return jnp.zeros_like(x)
    if p == 1:
        each = given * jnp.sign(apart)
    elif p == math.inf:
        each = jnp.where(jnp.abs(apart) == far, given * jnp.sign(apart), 0)
    else:
        safe, size = jnp.where(far == 0, 1, far), jnp.where(apart == 0, 1, jnp.abs(apart))
        each = apart * size ** (p - 2) * given / safe ** (p - 1)
        each = jnp.where((far == 0) | (apart == 0), 0, each)
    return jnp.zeros_like(x).at[one].add(each).at[other].add(-each)


@lowers("nonzero_static")
def nonzero_static(self: Any, *, size: int, fill_value: int = -1) -> Any:
    """Where the first so many elements are that are not 0; a fill where there are fewer."""
    if self.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), 1).astype(jnp.int64)


@lowers("masked_scatter_backward")
def masked_scatter_backward(grad_output: Any, mask: Any, sizes: Any) -> Any:
    """The gradient of the source's elements: those that no place took have 0."""
    count = math.prod(sizes)
    taken = jnp.broadcast_to(mask.astype(bool), grad_output.shape).reshape(-1)
    places = jnp.where(taken, jnp.cumsum(taken) - 1, count)
    nothing = jnp.zeros(count, grad_output.dtype)
    return nothing.at[places].set(grad_output.reshape(-1), mode="drop").reshape(tuple(sizes))


@lowers("histc")
def histc(self: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """How many elements each of so many equal bins has; from the least to the largest for 0, 0."""
    x = self.reshape(-1)
    low, high = jnp.asarray(min, x.dtype), jnp.asarray(max, x.dtype)
    if min == max and x.size:
        low, high = jnp.min(x), jnp.max(x)
    one = jnp.asarray(1, x.dtype)
    low, high = jnp.where(low == high, low - one, low), jnp.where(low == high, high + one, high)
    places = ((x - low) / (high - low) * bins).astype(jnp.int64)
    inside = (x >= low) & (x <= high)
    places = jnp.where(inside, jnp.minimum(places, bins - 1), bins)
    return jnp.zeros(bins, x.dtype).at[places].add(one, mode="drop")
