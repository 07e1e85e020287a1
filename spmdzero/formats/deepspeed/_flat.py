"""How DeepSpeed's ZeRO-1/2 lays a param group out: flat, padded, in equal parts by rank."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from spmdzero.formats._boxes import Box, box_slices, flat_boxes, whole_box
from spmdzero.formats._state import StoredTensor

# DeepSpeed's nccl_start_alignment_factor: each rank's partition starts at a multiple of it.
_ALIGNMENT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """One param group of a ZeRO-1/2 optimizer (DeepSpeed, runtime/zero/stage_1_and_2.py).

    Attributes:
        shapes: name -> shape, in the order of the flat tensor.
        gaps: elements of padding that follow each parameter (`parameter_alignment`).
    """

    shapes: Mapping[str, tuple[int, ...]]
    gaps: tuple[int, ...]

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Name -> its first element in the flat tensor."""
        starts, at = {}, 0
        for (name, shape), gap in zip(self.shapes.items(), self.gaps, strict=True):
            starts[name] = at
            at += math.prod(shape) + gap
        return starts

    @property
    def numel(self) -> int:
        """Elements, gaps included, without the padding at the end."""
        return sum(math.prod(shape) for shape in self.shapes.values()) + sum(self.gaps)

    def partition(self, rank: int, ranks: int) -> "Partition":
        """What of the flat tensor is one rank's."""
        step = _ALIGNMENT * ranks
        return Partition(group=self, rank=rank, size=-(-self.numel // step) * _ALIGNMENT)

    def stored(self, name: str, parts: Sequence[torch.Tensor]) -> StoredTensor:
        """One parameter in the ranks' `parts` of the flat tensor, each 1-dim, in rank order."""
        shape, start = self.shapes[name], self.starts[name]

        def read(box: Box) -> torch.Tensor:
            flat = span(parts, start, start + math.prod(shape))
            return flat.view(shape)[box_slices(box)].contiguous()

        return StoredTensor(
            shape=shape, dtype=parts[0].dtype, read=read, pieces=(whole_box(shape),)
        )


def span(parts: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """The elements `start` to `stop` of the concatenation of `parts`, 1-dim; a view if it can."""
    found, at = [], 0
    for part in parts:
        low, high = max(start - at, 0), min(stop - at, part.numel())
        if low < high:
            found.append(part[low:high])
        at += part.numel()
    return found[0] if len(found) == 1 else torch.cat(found) if found else parts[0][:0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """One rank's part of a flat group.

    Attributes:
        group: the group.
        rank: whose part.
        size: elements of each rank's part, padding included.
    """

    group: FlatGroup
    rank: int
    size: int

    @property
    def used(self) -> int:
        """Elements without the padding at the end."""
        return max(0, min(self.size, self.group.numel - self.rank * self.size))

    def pieces(self) -> Iterator[tuple[str, int, int, int]]:
        """Parameter, first and last of its own elements, and their place in the part."""
        start = self.rank * self.size
        for name, first in self.group.starts.items():
            low = max(start, first)
            high = min(start + self.size, first + math.prod(self.group.shapes[name]))
            if low < high:
                yield name, low - first, high - first, low - start

    def filled(self, tensors: Mapping[str, StoredTensor]) -> torch.Tensor:
        """The part, fp32 `[size]`, padded with zeros, from the group's whole tensors by name."""
        part = torch.zeros(self.size)
        for name, low, high, place in self.pieces():
            for box in flat_boxes(self.group.shapes[name], low, high):
                values = tensors[name].read(box).reshape(-1)
                part[place : place + values.numel()] = values
                place += values.numel()
        return part
