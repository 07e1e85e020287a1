"""Boxes: parts of a tensor, given by an interval for each dim."""

import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch

from spmdzero.errors import SpmdZeroUsageError

Box: TypeAlias = tuple[tuple[int, int], ...]
"""``(start, stop)`` for each dim of a tensor; ``()`` for a scalar."""


def whole_box(shape: Iterable[int]) -> Box:
    """The box of a whole tensor of `shape`."""
    return tuple((0, length) for length in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the box."""
    return tuple(stop - start for start, stop in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    """The slices that cut the box out of the whole tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def meet(first: Box, second: Box) -> Box | None:
    """The intersection of two boxes, None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def within(part: Box, box: Box) -> tuple[slice, ...]:
    """The slices that cut `part` out of a tensor that holds `box`."""
    return tuple(
        slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True)
    )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop` of a flattened tensor as boxes, in order, row-major each.

    There are at most ``2 * len(shape) - 1`` boxes: partial rows at both ends, whole ones between.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start, stop),) if shape else ()
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for box in flat_boxes(shape[1:], start - first * inner, stop - first * inner):
            yield ((first, first + 1), *box)
        return
    if start % inner:
        yield from flat_boxes(shape, start, (first + 1) * inner)
        first += 1
    whole = stop // inner
    if first < whole:
        yield ((first, whole), *whole_box(shape[1:]))
    yield from flat_boxes(shape, max(whole * inner, start), stop) if stop % inner else ()


def assemble(
    box: Box, pieces: Iterable[tuple[Box, torch.Tensor]], *, dtype: torch.dtype
) -> torch.Tensor:
    """The part `box` of a tensor, contiguous, put together from stored pieces.

    Raises:
        SpmdZeroUsageError: the pieces don't cover the part.
    """
    result = torch.empty(box_shape(box), dtype=dtype)
    missing = result.numel()
    for held, tensor in pieces:
        common = meet(box, held)
        if common is None:
            continue
        if common == box == held:
            return tensor.contiguous()
        result[within(common, box)] = tensor[within(common, held)]
        missing -= math.prod(box_shape(common))
    if missing:
        raise SpmdZeroUsageError(f"{missing} elements of the part {box} are in no piece")
    return result
