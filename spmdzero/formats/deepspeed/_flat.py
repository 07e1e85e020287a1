"""DeepSpeed's layouts of parameters over its ranks: flat and padded, each rank with a part."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from spmdzero.formats._boxes import Box, box_slices, flat_boxes, whole_box
from spmdzero.formats._state import StoredTensor

# DeepSpeed's nccl_start_alignment_factor: each rank's partition starts at a multiple of it.
_ALIGNMENT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """One param group of a ZeRO-1/2 optimizer (DeepSpeed, runtime/zero/stage_1_and_2.py).

    The flat tensor of all parameters is cut into equal parts by rank.

    Attributes:
        shapes: name -> shape, in the order of the flat tensor.
        gaps: number of padding elements after each parameter (`parameter_alignment`).
    """

    shapes: Mapping[str, tuple[int, ...]]
    gaps: tuple[int, ...]

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Name of a parameter -> index of its first element in the flat tensor."""
        starts, at = {}, 0
        for (name, shape), gap in zip(self.shapes.items(), self.gaps, strict=True):
            starts[name] = at
            at += math.prod(shape) + gap
        return starts

    @property
    def numel(self) -> int:
        """Number of elements with gaps, but without the padding at the end."""
        return sum(math.prod(shape) for shape in self.shapes.values()) + sum(self.gaps)

    def partition(self, rank: int, ranks: int) -> "Partition":
        """One rank's part of the flat tensor."""
        size = -(-self.numel // (_ALIGNMENT * ranks)) * _ALIGNMENT
        start = rank * size
        pieces = []
        for name, first in self.starts.items():
            low = max(start, first)
            high = min(start + size, first + math.prod(self.shapes[name]))
            if low < high:
                pieces.append((name, low - first, high - first, low - start))
        used = max(0, min(size, self.numel - start))
        return Partition(shapes=self.shapes, size=size, used=used, pieces=tuple(pieces))

    def stored(self, name: str, parts: Sequence[torch.Tensor]) -> StoredTensor:
        """One parameter in the ranks' `parts` of the flat tensor, each 1-dim, in rank order."""
        return stored_in(parts, self.shapes[name], start=self.starts[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedGroup:
    """One sub-group of a ZeRO-3 optimizer (DeepSpeed, runtime/zero/stage3.py).

    Each parameter is cut into equal parts by rank; a rank's flat tensor holds its parts.

    Attributes:
        shapes: name -> shape, in the order of the flat tensors.
        ranks: number of ranks.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ranks: int

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Name -> first and last index of its elements in each rank's flat tensor."""
        places, at = {}, 0
        for name, shape in self.shapes.items():
            stop = at + -(-math.prod(shape) // self.ranks)
            places[name], at = (at, stop), stop
        return places

    @property
    def numel(self) -> int:
        """Number of elements in all ranks' flat tensors, with the padding at parameters' ends."""
        return self.ranks * max((stop for _, stop in self.places.values()), default=0)

    def partition(self, rank: int, ranks: int) -> "Partition":
        """One rank's part, of the `ranks` for which the group is cut."""
        assert ranks == self.ranks
        pieces = []
        for name, (start, stop) in self.places.items():
            low = rank * (stop - start)
            high = min(low + stop - start, math.prod(self.shapes[name]))
            if low < high:
                pieces.append((name, low, high, start))
        size = self.numel // ranks
        return Partition(shapes=self.shapes, size=size, used=size, pieces=tuple(pieces))

    def stored(self, name: str, parts: Sequence[torch.Tensor]) -> StoredTensor:
        """One parameter in the ranks' flat tensors, `parts`, each 1-dim, in rank order."""
        start, stop = self.places[name]
        return stored_in([part[start:stop] for part in parts], self.shapes[name])


Group: TypeAlias = FlatGroup | PartitionedGroup
"""Parameters that stand one after the other in a flat tensor of each rank."""


def stored_in(
    parts: Sequence[torch.Tensor], shape: tuple[int, ...], *, start: int = 0
) -> StoredTensor:
    """A tensor of `shape` with the elements of the 1-dim `parts` from index `start` on."""

    def read(box: Box) -> torch.Tensor:
        # Only the rows in the box are put together.
        rows, inner = (box[0], math.prod(shape[1:])) if shape else ((0, 1), 1)
        flat = span(parts, start + rows[0] * inner, start + rows[1] * inner)
        held = flat.view(rows[1] - rows[0], *shape[1:]) if shape else flat.view(())
        return held[(slice(None), *box_slices(box[1:]))[: len(shape)]].contiguous()

    return StoredTensor(shape=shape, dtype=parts[0].dtype, read=read, pieces=(whole_box(shape),))


def span(parts: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """The elements `start` to `stop` of the concatenation of `parts`, 1-dim; a view if possible."""
    found, at = [], 0
    for part in parts:
        low, high = max(start - at, 0), min(stop - at, part.numel())
        if low < high:
            found.append(part[low:high])
        at += part.numel()
    return found[0] if len(found) == 1 else torch.cat(found) if found else parts[0][:0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """One rank's part of a group, as a flat tensor.

    Attributes:
        shapes: of the group.
        size: number of elements with padding.
        used: number of elements without the padding at the end.
        pieces: for each parameter in it: the name, the first and the last index of its elements in
            the parameter, and the index of the first in the flat tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    size: int
    used: int
    pieces: tuple[tuple[str, int, int, int], ...]

    def filled(
        self, tensors: Mapping[str, StoredTensor], *, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The rank's part, `[size]`, padded with zeros, from the group's whole tensors by name."""
        part = torch.zeros(self.size, dtype=dtype)
        for name, low, high, place in self.pieces:
            for box in flat_boxes(self.shapes[name], low, high):
                values = tensors[name].read(box).reshape(-1)
                part[place : place + values.numel()] = values
                place += values.numel()
        return part
