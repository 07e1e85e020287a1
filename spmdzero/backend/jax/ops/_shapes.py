"""Dims and sizes in the forms that torch accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def axis(dim: int, ndim: int) -> int:
    """The dim counted from the front; an array of no dims takes 0 and -1."""
    return dim % max(ndim, 1)


def axes(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims counted from the front; None and an empty list mean all."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(ndim))
    dims = dim if isinstance(dim, Sequence) else (dim,)
    # For an array without dims torch accepts a dim, which is no axis for JAX.
    return tuple(axis(d, ndim) for d in dims) if ndim else ()


def filled(size: Sequence[int], total: int) -> tuple[int, ...]:
    """The size with its -1, if any, replaced by the right number."""
    known = math.prod(n for n in size if n != -1)
    return tuple(total // max(known, 1) if n == -1 else n for n in size)


def clipped(start: int | None, end: int | None, length: int) -> tuple[int, int]:
    """The bounds of a slice within a dim of this length."""
    low, high, _ = slice(start, end).indices(length)
    return low, max(low, high)


def at(dim: int, ndim: int, index: Any) -> tuple[Any, ...]:
    """The index that selects `index` in one dim and all of the others."""
    return (slice(None),) * axis(dim, ndim) + (index,)


def several(value: Any, count: int) -> tuple[Any, ...]:
    """One number for each of `count` dims, from a number or a list; a list of one is repeated."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * count if len(values) == 1 else values
