"""A mask's elements in a fixed number, and counts of elements in bins."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax.ops._table import lowers


@lowers("nonzero_static")
def nonzero_static(self: Any, *, size: int, fill_value: int = -1) -> Any:
    """The places of the first `size` elements that are not 0, padded with the fill value."""
    if self.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), 1).astype(jnp.int64)


@lowers("masked_scatter_backward")
def masked_scatter_backward(grad_output: Any, mask: Any, sizes: Any) -> Any:
    """The gradient of the source's elements; 0 for those that were not taken."""
    count = math.prod(sizes)
    taken = jnp.broadcast_to(mask.astype(bool), grad_output.shape).reshape(-1)
    places = jnp.where(taken, jnp.cumsum(taken) - 1, count)
    nothing = jnp.zeros(count, grad_output.dtype)
    return nothing.at[places].set(grad_output.reshape(-1), mode="drop").reshape(tuple(sizes))


@lowers("histc")
def histc(self: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Number of elements in each of `bins` equal bins; 0, 0 means from the least to the largest."""
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
