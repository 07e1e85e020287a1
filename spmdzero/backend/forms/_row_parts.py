"""How many devices share the rows that run: each has a part of the positions of every row."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch

_parts: contextvars.ContextVar[int] = contextvars.ContextVar("_parts", default=1)


@contextlib.contextmanager
def rows_in_parts(parts: int) -> Iterator[None]:
    """Context in which `parts` devices share each row."""
    before = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(before)


def parts_of_rows(rows: torch.Tensor) -> int:
    """Number of devices with a part each of `[rows, length, ...]`; 1 where each has all of it."""
    parts = _parts.get()
    return 1 if rows.dim() < 2 or rows.shape[1] % parts else parts


def by_device(rows: torch.Tensor, parts: int) -> torch.Tensor:
    """`[parts, rows * length / parts, ...]` of `[rows, length, ...]`: positions by their device.

    Nothing moves. The first dim is split over devices, so that a compiler can divide what takes
    some of the second, or merges both.
    """
    return rows.unflatten(1, (parts, -1)).transpose(0, 1).flatten(1, 2)
