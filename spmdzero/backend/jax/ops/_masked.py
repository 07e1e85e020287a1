"""Writes selected by masks: only the devices know how many elements a mask selects."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


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
