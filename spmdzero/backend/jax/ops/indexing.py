"""Reading and writing by arrays of indices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmdzero.backend.jax.axes._slice import by_positions, sharing_axes
from spmdzero.backend.jax.ops._dtypes import cast, dtype_of, is_inexact, wide
from spmdzero.backend.jax.ops._shapes import at, axis
from spmdzero.backend.jax.ops._table import UnsupportedError, lowers


def is_mask(index: Any) -> bool:
    """Whether an index is a mask, which selects where it is true."""
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


def poison(dtype: Any) -> Any:
    """The value for elements that have no right one, the same that JAX gathers from outside.

    It is NaN, the least signed or the greatest unsigned integer, or True.
    """
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if dtype == jnp.bool_:
        return True
    limits = jnp.iinfo(dtype)
    return limits.min if limits.min else limits.max


def masked_put(self: Any, indices: Any, values: Any, *, accumulate: bool) -> Any:
    """self with values at the indices, at least one of which is a mask.

    Where the masks select another number of elements than the other indices or the values have,
    torch raises. Here every element becomes `poison`.

    Args:
        self: any shape.
        indices: arrays of integers, masks, and Nones, as in torch's ``index_put``.
        values: in self's dtype, of a shape that broadcasts to that of the selection.
        accumulate: whether the values are added.
    """
    places = [place for place, index in enumerate(indices) if index is not None]
    given = [indices[place] for place in places]
    taken = sum(index.ndim if is_mask(index) else 1 for index in given)
    adjacent = places == list(range(places[0], places[-1] + 1))
    # Number of the selection's dims that come after those of the indices, as in NumPy.
    after = self.ndim - taken - (places[0] if adjacent else 0)
    length = values.shape[-after - 1] if values.ndim > after else 1
    if len(given) == 1 and length == 1:
        mask = given[0].reshape(given[0].shape + (1,) * after).astype(bool)
        if values.ndim > after:
            split = values.ndim - after - 1
            values = values.reshape(values.shape[:split] + (1,) * taken + values.shape[split + 1 :])
        return jnp.where(mask, self + values if accumulate else values, self)

    last = jnp.broadcast_shapes((1,), *(i.shape[-1:] for i in given if not is_mask(i)))[0]
    masks = [index.astype(bool) for index in given if is_mask(index)]
    known = next((n for n in (last, length) if n != 1), None)
    size = max(mask.size for mask in masks) if known is None else known
    numbers = [jnp.sum(mask, dtype=jnp.int64) for mask in masks]
    count = jnp.asarray(last, jnp.int64)
    for number in numbers:
        count = jnp.where(count == 1, number, count)
    right = (count == length) | (length == 1)
    for number in numbers:
        right &= (number == count) | (number == 1)

    ranks, parts = jnp.arange(size), []
    for index in indices:
        if index is None:
            parts.append(slice(None))
        elif is_mask(index):
            first = jnp.sum(index, dtype=jnp.int64) == 1
            found = jnp.nonzero(index, size=size, fill_value=0)
            parts.extend(jnp.where(first, place[:1], place) if size else place for place in found)
        else:
            parts.append(index)
    # Places behind the last selected element are set outside, where nothing is written.
    parts[places[0]] = jnp.where(ranks < count, parts[places[0]], self.shape[places[0]])
    target = self.at[tuple(parts)]
    changed = (target.add if accumulate else target.set)(values, mode="drop")
    return jnp.where(right, changed, jnp.asarray(poison(self.dtype), self.dtype))


def _from_front(index: Any, length: int) -> Any:
    """Makes negative indices lie outside for JAX, as torch counts these from the front only.

    A read outside gives `poison`: torch raises there, but a program can't.
    """
    return jnp.where(index < 0, length, index)


def _selection(indices: Any) -> tuple[Any, ...]:
    """NumPy's index for torch's list of arrays and Nones."""
    return tuple(slice(None) if index is None else index for index in indices)


@lowers("index.Tensor", "_unsafe_index.Tensor")
def index(self: Any, indices: Any) -> Any:
    """The elements at the indices."""
    if any(map(is_mask, indices)):
        raise UnsupportedError(
            "the shape of what a mask selects depends on data",
            "Use torch.where or a mask of the same shape",
        )
    return self.at[_selection(indices)].get(mode="fill")


@lowers("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(
    self: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False
) -> Any:
    """self with the values written at the indices, or added there."""
    values = values.astype(self.dtype)
    if any(map(is_mask, indices)):
        return masked_put(self, indices, values, accumulate=accumulate)
    target = self.at[_selection(indices)]
    return target.add(values) if accumulate else target.set(values)


@lowers("gather")
def gather(self: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """The elements that the index selects along a dim."""
    if self.ndim == 0 or index.ndim == 0:
        return jnp.broadcast_to(self.reshape(-1)[0], index.shape)
    place = axis(dim, self.ndim)
    part = self[tuple(slice(None) if d == place else slice(n) for d, n in enumerate(index.shape))]
    index = _from_front(index.astype(jnp.int64), part.shape[place])
    if "sequence" in sharing_axes() and index.shape == _without(part.shape, place):
        # As in `scatter`; libtpu 0.0.21 aborts where it fuses a part of the index with a gather.
        named = lax.broadcasted_iota(index.dtype, part.shape, place) == index
        return jnp.where(named, part, 0).sum(place, keepdims=True, dtype=part.dtype)
    return jnp.take_along_axis(part, index, place, mode="fill")


def _places(dim: int, index: Any) -> tuple[Any, ...]:
    """The index of every dim, of which `index` is that of one."""
    return tuple(
        index if d == axis(dim, index.ndim) else lax.broadcasted_iota(index.dtype, index.shape, d)
        for d in range(index.ndim)
    )


_UPDATES = {
    "add": "add",
    "sum": "add",
    "mean": "add",
    "multiply": "multiply",
    "prod": "multiply",
    "amax": "max",
    "amin": "min",
}


@lowers("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
def scatter(self: Any, dim: int, index: Any, src: Any, *, reduce: str | None = None) -> Any:
    """self with the source's elements written where the index points along a dim."""
    if self.ndim == 0:
        return scatter(self[None], 0, index.reshape(-1), _flat(src), reduce=reduce)[0]
    if index.size == 0:
        return self
    if hasattr(src, "ndim") and src.ndim:
        src = src[tuple(slice(n) for n in index.shape)]
    whole, place = wide(self), axis(dim, self.ndim)
    src = cast(src, dtype_of(whole))
    if reduce in (None, "add") and index.shape == _without(self.shape, place):
        # Each row has one place, as in a loss's targets. Comparing lets devices keep their rows;
        # XLA's scatter would gather all rows' indices, and is slower on TPUs.
        named = lax.broadcasted_iota(index.dtype, self.shape, place) == index
        return jnp.where(named, src if reduce is None else whole + src, whole)
    target = whole.at[_places(dim, index)]
    return target.set(src) if reduce is None else getattr(target, _UPDATES[reduce])(src)


def _without(shape: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*shape[:place], 1, *shape[place + 1 :])


def _flat(src: Any) -> Any:
    return src.reshape(-1) if hasattr(src, "reshape") else src


@lowers("scatter_add")
def scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    """self with the source's elements added where the index points along a dim."""
    return scatter(self, dim, index, src, reduce="add")


@lowers("scatter_reduce.two")
def scatter_reduce(
    self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Scatters with a reduction, which includes self's elements or leaves them out."""
    if self.ndim == 0:
        whole = scatter_reduce(
            self[None], 0, index.reshape(-1), _flat(src), reduce, include_self=include_self
        )
        return whole[0]
    if not include_self and index.size:
        places = self.at[_places(dim, index)]
        neutral = {"prod": 1, "amax": _least(self), "amin": _most(self)}
        self = places.set(jnp.asarray(neutral.get(reduce, 0), self.dtype))
    out = scatter(self, dim, index, src, reduce=reduce)
    if reduce != "mean":
        return out
    counts = jnp.full(self.shape, int(include_self), jnp.int64)
    counts = jnp.maximum(scatter(counts, dim, index, 1, reduce="add"), 1)
    return out / counts.astype(out.dtype) if is_inexact(dtype_of(out)) else out // counts


def _least(like: Any) -> Any:
    if is_inexact(dtype_of(like)):
        return -jnp.inf
    return False if like.dtype == bool else jnp.iinfo(like.dtype).min


def _most(like: Any) -> Any:
    if is_inexact(dtype_of(like)):
        return jnp.inf
    return True if like.dtype == bool else jnp.iinfo(like.dtype).max


@lowers("index_select")
def index_select(self: Any, dim: int, index: Any) -> Any:
    """The elements at the given indices of a dim."""
    if self.ndim == 0:
        return self
    place = axis(dim, self.ndim)
    return jnp.take(self, _from_front(index.reshape(-1), self.shape[place]), place, mode="fill")


@lowers("index_add")
def index_add(self: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """self with alpha times the source added at the indices of a dim."""
    x = wide(jnp.atleast_1d(self))
    source = source.astype(x.dtype) * cast(alpha, dtype_of(x))
    place = at(dim, x.ndim, index.reshape(-1))
    return x.at[place].add(source.reshape(-1) if self.ndim == 0 else source).reshape(self.shape)


@lowers("index_copy")
def index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    """self with the source written at the indices of a dim."""
    x = jnp.atleast_1d(self)
    source = source.reshape(-1) if x.ndim == 1 else source
    return x.at[at(dim, x.ndim, index.reshape(-1))].set(source).reshape(self.shape)


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(self: Any, dim: int, index: Any, value: Any) -> Any:
    """self with one value written at the indices of a dim."""
    x = jnp.atleast_1d(self)
    value = cast(value, dtype_of(self))
    return x.at[at(dim, x.ndim, index.reshape(-1))].set(value).reshape(self.shape)


@lowers("index_reduce")
def index_reduce(
    self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Does what `index_add` does, with another reduction."""
    if self.ndim == 0:
        whole = index_reduce(
            self[None], 0, index.reshape(-1), source.reshape(-1), reduce, include_self=include_self
        )
        return whole[0]
    place = axis(dim, self.ndim)
    rows = index.reshape((-1,) + (1,) * (self.ndim - 1 - place))
    return scatter_reduce(
        self, dim, jnp.broadcast_to(rows, source.shape), source, reduce, include_self=include_self
    )


@lowers("take")
def take(self: Any, index: Any) -> Any:
    """The elements at indices of the flattened array."""
    return self.reshape(-1).at[index].get(mode="fill")


@lowers("put")
def put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """self with the source written at indices of the flattened array."""
    target = wide(self).reshape(-1).at[index]
    source = source.reshape(index.shape).astype(wide(self).dtype)
    return (target.add(source) if accumulate else target.set(source)).reshape(self.shape)


@lowers("masked_scatter")
def masked_scatter(self: Any, mask: Any, source: Any) -> Any:
    """self with the source's elements, in order, where the mask is true."""
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    mask = jnp.broadcast_to(mask.astype(bool), shape)
    order = jnp.cumsum(mask.reshape(-1)) - 1
    if source.size == 0:
        return jnp.broadcast_to(self, shape)
    values = source.reshape(-1)[jnp.clip(order, 0, source.size - 1)].reshape(shape)
    return jnp.where(mask, values, self)


@lowers("embedding")
def embedding(weight: Any, indices: Any, padding_idx: int = -1, *_: Any, **__: Any) -> Any:
    """The weight's rows at the indices."""

    def taken(indices: Any, weight: Any) -> Any:
        return jnp.take(weight, _from_front(indices, weight.shape[0]), 0, mode="fill")

    return by_positions(taken, indices, weight)


@lowers("embedding_dense_backward")
def embedding_dense_backward(
    grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """The sums of the rows' gradients, without that of the padding's row."""
    grad, rows = wide(grad_output), indices.astype(jnp.int64)
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, jnp.int64).at[rows].add(1)
        grad = grad / counts[rows][..., None].astype(grad.dtype)
    # Rows outside the table are dropped, and so the padding's gradient is.
    rows = jnp.where(rows == padding_idx, num_weights, rows) if padding_idx >= 0 else rows

    def added(rows: Any, grad: Any) -> Any:
        grad, rows = grad.reshape(-1, grad.shape[-1]), rows.reshape(-1)
        return jnp.zeros((num_weights, grad.shape[1]), grad.dtype).at[rows].add(grad, mode="drop")

    return by_positions(added, rows, grad, summed=True)
