"""`embedding_bag`: sums, means and maxima of a table's rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import UnsupportedError, lowers
from spmdzero.backend.jax.ops.indexing import embedding

_SUM, _MEAN, _MAX = 0, 1, 2


def _bags(indices: Any, offsets: Any, count: int) -> Any:
    """The bag of each index; `count` for indices behind the last bag."""
    places = jnp.arange(indices.shape[0])
    bags = jnp.searchsorted(offsets[:count], places, side="right") - 1
    if offsets.shape[0] > count:
        bags = jnp.where(places < offsets[count], bags, count)
    return bags.astype(jnp.int64)


def _sizes(indices: Any, bags: Any, count: int, padding: int) -> Any:
    counted = (indices != padding).astype(jnp.int64)
    return jnp.zeros(count, jnp.int64).at[bags].add(counted, mode="drop")


def _maxima(rows: Any, bags: Any, count: int, kept: Any) -> tuple[Any, Any]:
    """The largest element of each bag, and the place of the first index that has it."""
    width, places = rows.shape[1], jnp.arange(rows.shape[0])
    rows = jnp.where(kept, rows, -jnp.inf)
    top = jnp.full((count, width), -jnp.inf, rows.dtype).at[bags].max(rows, mode="drop")
    has = kept & (rows == jnp.take(top, bags, 0, mode="clip"))
    last = rows.shape[0]
    where = jnp.where(has, places[:, None], last)
    first = jnp.full((count, width), last).at[bags].min(where, mode="drop")
    return jnp.where(first == last, 0, top), jnp.minimum(first, max(last - 1, 0))


@lowers("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, Any, Any, Any]:
    """The bags; then for the gradient each index's bag, the bags' sizes, and the maxima's rows."""
    count = offsets.shape[0] - int(include_last_offset)
    bags = _bags(indices, offsets, count)
    sizes = _sizes(indices, bags, count, padding_idx)
    rows = wide(embedding(weight, indices))
    # Without padding torch passes -1, which is no index.
    kept = ((indices != padding_idx) | (padding_idx < 0))[:, None]
    if per_sample_weights is not None:
        rows = rows * wide(per_sample_weights)[:, None]
    of = indices.dtype
    maxima = jnp.zeros((0,), of)
    if mode == _MAX and indices.shape[0]:
        out, places = _maxima(rows, bags, count, kept)
        maxima = indices[places]
    else:
        zeros = jnp.zeros((count, weight.shape[1]), rows.dtype)
        out = zeros.at[bags].add(jnp.where(kept, rows, 0), mode="drop")
        maxima = jnp.zeros(out.shape, of) if mode == _MAX else maxima
    if mode == _MEAN:
        out = out / jnp.maximum(sizes, 1)[:, None].astype(out.dtype)
    sizes = jnp.pad(sizes, (0, offsets.shape[0] - count))
    return out, bags.astype(of), sizes.astype(of), maxima


@lowers("_embedding_bag_backward")
def embedding_bag_backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    """The gradient of the table."""
    if sparse:
        raise UnsupportedError("JAX has no sparse gradients", "Leave out sparse=True")
    grad, count = wide(grad), grad.shape[0]
    bags = _bags(indices, offsets, count)
    sizes = _sizes(indices, bags, count, padding_idx)
    nothing = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    if mode == _MAX:
        columns = jnp.arange(grad.shape[1])
        given = jnp.where(sizes[:, None] > 0, grad, 0)
        return nothing.at[maximum_indices, columns].add(given)
    if mode == _MEAN:
        grad = grad / jnp.maximum(sizes, 1)[:, None].astype(grad.dtype)
    rows = jnp.take(grad, bags, 0, mode="fill", fill_value=0)
    if per_sample_weights is not None:
        rows = rows * wide(per_sample_weights)[:, None]
    if scale_grad_by_freq:
        often = jnp.zeros(num_weights, jnp.int64).at[indices].add(1)
        rows = rows / often[indices][:, None].astype(rows.dtype)
    return nothing.at[indices].add(jnp.where((indices != padding_idx)[:, None], rows, 0))


@lowers("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    """The gradient of the factors of the rows."""
    bags = _bags(indices, offsets, grad.shape[0])
    rows = wide(embedding(weight, indices))
    dots = jnp.sum(jnp.take(wide(grad), bags, 0, mode="fill", fill_value=0) * rows, -1)
    return jnp.where(indices != padding_idx, dots, 0)
