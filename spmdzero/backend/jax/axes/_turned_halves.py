"""Rotary embeddings: the halves of each head change places, and one of them its sign.

Models write it as slices that are put together again, and so does their gradient. libtpu writes
halves to memory as arrays of their own, whose 64 columns take the room of 128, and reads them
again. One product with a matrix of 0, 1 and -1 does the same where the numbers are, in half of
the time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdzero.backend.jax._versions import is_for_tpu
from spmdzero.backend.jax.graph._graph import Slot, Step
from spmdzero.backend.jax.graph._operations import AtenOp


@dataclasses.dataclass(frozen=True)
class _Half:
    """One half of a tensor's last dim, or its negative.

    Attributes:
        source: the tensor.
        second: whether it is the second half.
        negated: whether its sign is changed.
    """

    source: Slot
    second: bool
    negated: bool


def with_turned_halves(steps: Sequence[Step]) -> list[Step]:
    """The steps, in which one operation makes what slices and their joining make otherwise.

    Steps whose results nobody reads any more stay; JAX leaves them out.
    """
    made_by = {slot.number: step for step in steps for slot in step.made}
    return [_turned(step, made_by) for step in steps]


def _turned(step: Step, made_by: Mapping[int, Step]) -> Step:
    find = _JOINED.get(step.op.key)
    halves = find(step, made_by) if find else None
    if halves is None:
        return step
    first, second = halves
    if first.source is not second.source or not first.second or second.second:
        return step
    if first.negated == second.negated:
        # Halves of something else, as of a mask, whose infinities a product would make NaN.
        return step
    signs = tuple(-1 if half.negated else 1 for half in halves)
    return dataclasses.replace(step, op=_OPERATION, args=(first.source, signs), kwargs={})


def _of_cat(step: Step, made_by: Mapping[int, Step]) -> tuple[_Half, _Half] | None:
    parts, dim = (*step.args, 0)[:2]
    if len(parts) != 2 or not _is_last(dim, step.made[0].shape):
        return None
    first, second = (_half_of(part, made_by) for part in parts)
    return (first, second) if first and second else None


def _of_sum(step: Step, made_by: Mapping[int, Step]) -> tuple[_Half, _Half] | None:
    """Sums gradients in each of the two halves, 0 elsewhere."""
    if len(step.args) != 2 or step.kwargs:
        return None
    found = {}
    for part in step.args:
        back = made_by.get(part.number) if isinstance(part, Slot) else None
        if back is None or back.op.key != "aten.slice_backward.default":
            return None
        grad, sizes, *where = back.args
        there = _is_second(sizes, *where)
        half = _half_of(grad, made_by)
        if there is None or half is None:
            return None
        found[there] = half
    return (found[False], found[True]) if len(found) == 2 else None


_JOINED: dict[Any, Callable[[Step, Mapping[int, Step]], tuple[_Half, _Half] | None]] = {
    "aten.cat.default": _of_cat,
    "aten.add.Tensor": _of_sum,
}


def _half_of(part: Slot, made_by: Mapping[int, Step]) -> _Half | None:
    made = made_by.get(part.number)
    negated = made is not None and made.op.key == "aten.neg.default"
    if made is not None and negated:
        (part,) = made.args
        made = made_by.get(part.number)
    if made is None or made.op.key not in ("aten.slice.Tensor", "aten.split.Tensor"):
        return None
    source, *where = made.args
    if made.op.key == "aten.split.Tensor":
        size, dim = (*where, 0)[:2]
        start = size * made.made.index(part)
        where = [dim, start, start + size]
    second = _is_second(source.shape, *where)
    return None if second is None else _Half(source, second, negated)


def _is_second(
    shape: Sequence[int], dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> bool | None:
    """Whether a slice is the second half of the last dim, None if it is neither half."""
    size = shape[-1]
    if not _is_last(dim, shape) or size % 2 or step != 1:
        return None
    low, high, _ = slice(start, end).indices(size)
    return {(0, size // 2): False, (size // 2, size): True}.get((low, high))


def _is_last(dim: int, shape: Sequence[int]) -> bool:
    return dim in (-1, len(shape) - 1)


# Of a head. A product's time grows with the width, that of the slices doesn't.
_WIDEST = 256


def turned(x: jax.Array, signs: tuple[int, int]) -> jax.Array:
    """`x` with the halves of its last dim in each other's place, times `signs`.

    In bf16 on a TPU it is a product, exact as each sum has one summand that isn't 0. An infinity or
    NaN there makes NaN of its whole row, of which attention would make NaN anyway.
    """
    half = x.shape[-1] // 2
    if is_for_tpu() and x.dtype == jnp.bfloat16 and 2 * half <= _WIDEST:
        columns = jnp.arange(2 * half)
        below = columns[:, None] - columns
        places = signs[0] * (below == half) + signs[1] * (below == -half)
        return jnp.matmul(x, places.astype(x.dtype), preferred_element_type=x.dtype)
    parts = (x[..., half:], x[..., :half])
    return jnp.concatenate(
        [-part if sign < 0 else part for part, sign in zip(parts, signs, strict=True)], axis=-1
    )


_OPERATION = AtenOp("turned_halves", turned)
