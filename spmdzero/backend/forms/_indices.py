"""Indices that lie outside of what they index: found on the devices, said when the host reads.

A compiled program can't raise. JAX gives NaN for what is read outside, and drops what is written
there; torch_xla takes the nearest element.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from spmdzero.backend.forms._masks import is_mask
from spmdzero.errors import OutOfRangeError

# The label under which a pass through the replica region has its flag.
INDICES = "indices"
# What an index of a loss is called.
LABEL = "a label of the loss"
_INT32 = torch.iinfo(torch.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexRange:
    """The range that a tensor of indices has to keep to.

    Attributes:
        what: the operation, as a user calls it.
        size: number of elements that are indexed; the highest index is one less.
        lowest: the lowest index.
        ignored: an index that stands for none, as a loss's `ignore_index`; None if there is none.
    """

    what: str
    size: int
    lowest: int = 0
    ignored: int | None = None


Indexed = tuple[torch.Tensor, IndexRange]


def indexed_by(name: str, args: tuple[Any, ...]) -> Iterator[Indexed]:
    """Yields the tensors of indices among an operation's arguments, with their ranges.

    Args:
        name: of the operation, without its overload, such as ``"scatter_add_"``.
        args: its arguments; of tensors the shape and dtype count.
    """
    rule = _RULES.get(name.strip("_"))
    if rule is not None:
        yield from rule(name.strip("_"), *args)


def _rows(name: str, weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> Iterator[Indexed]:
    yield indices, IndexRange(what=name, size=weight.shape[0])


def _along_dim(
    name: str, self: torch.Tensor, dim: int, index: torch.Tensor, *_: Any, negative: bool = False
) -> Iterator[Indexed]:
    size = self.shape[dim] if len(self.shape) else 1
    yield index, IndexRange(what=name, size=size, lowest=-size if negative else 0)


def _each_dim(name: str, self: torch.Tensor, indices: Any, *_: Any) -> Iterator[Indexed]:
    if any(map(is_mask, indices)):
        # A mask stands for as many dims as it has itself.
        return
    for dim, index in enumerate(indices):
        if index is not None:
            size = self.shape[dim]
            yield index, IndexRange(what="an index in [...]", size=size, lowest=-size)


def _flattened(name: str, self: torch.Tensor, index: torch.Tensor, *_: Any) -> Iterator[Indexed]:
    size = math.prod(self.shape)
    yield index, IndexRange(what=name, size=size, lowest=-size)


def _classes(name: str, self: torch.Tensor, target: torch.Tensor, *rest: Any) -> Iterator[Indexed]:
    size = self.shape[1] if len(self.shape) > 1 else self.shape[0]
    yield target, IndexRange(what=LABEL, size=size, ignored=rest[2])


_RULES: dict[str, Callable[..., Iterator[Indexed]]] = {
    "embedding": _rows,
    "embedding_bag": _rows,
    "embedding_bag_forward_only": _rows,
    "gather": _along_dim,
    "index": _each_dim,
    "index_add": _along_dim,
    "index_copy": _along_dim,
    "index_fill": functools.partial(_along_dim, negative=True),
    "index_put": _each_dim,
    "index_put_impl": _each_dim,
    "index_reduce": _along_dim,
    "index_select": _along_dim,
    "nll_loss_forward": _classes,
    "nll_loss2d_forward": _classes,
    "put": _flattened,
    "scatter": _along_dim,
    "scatter_add": _along_dim,
    "scatter_reduce": _along_dim,
    "take": _flattened,
}


# One for each replica region that the running code is in.
noting: list[Callable[[torch.Tensor, IndexRange], None]] = []


def note_index(index: torch.Tensor, allowed: IndexRange) -> None:
    """Has the devices compare indices with their range, if a forward in the replica region runs.

    It is for code that looks indices up in other ways than by torch's operations.
    """
    if noting:
        with torch.no_grad():
            noting[-1](index.detach(), allowed)


class IndexSites:
    """The places in the user's code where indices are used, by number.

    A flag is int32 `[..., 2]`: 1 + the number of the first place whose index lay outside, 0 for
    none; and that index, cut to 32 bits.
    """

    def __init__(self) -> None:
        # A place keeps its number, which is a constant of programs.
        self._numbers: dict[tuple[str, IndexRange], int] = {}

    def flag(self, index: torch.Tensor, allowed: IndexRange, where: str) -> torch.Tensor | None:
        """The flag of one tensor of indices, `[2]`; None if it can't lie outside."""
        if not index.numel() or allowed.size > _INT32.max:
            return None
        number = self._numbers.setdefault((where, allowed), len(self._numbers) + 1)
        if allowed.ignored is not None:
            index = torch.where(index == allowed.ignored, max(allowed.lowest, 0), index)
        # TPUs have no 64-bit integers, and libtpu 0.0.21 aborts on some of their operations.
        narrow = index.clamp(_INT32.min, _INT32.max) if index.dtype == torch.int64 else index
        narrow = narrow.to(torch.int32)
        highest, lowest = narrow.amax(), narrow.amin()
        high = highest >= allowed.size
        outside = (high | (lowest < allowed.lowest)).to(torch.int32)
        return torch.stack([outside * number, outside * torch.where(high, highest, lowest)])

    def refuse(self, flag: torch.Tensor) -> None:
        """Raises OutOfRangeError if a flag, `[..., 2]` on the CPU, says so."""
        for number, index in flag.reshape(-1, 2).tolist():
            if number:
                (where, allowed), *_ = (key for key, n in self._numbers.items() if n == number)
                raise OutOfRangeError(_text(where, allowed, index))


def first_flag(known: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The flag `known`, or `new` where `known` is none; both are of one kind."""
    if known.dim() == 0:
        return known | new
    return torch.where(known[..., :1] == 0, new, known)


class RegionIndices:
    """Takes note of the indices of one forward.

    Args:
        sites: numbers the places.

    Attributes:
        flag: of all indices so far, see `IndexSites`; None if there were none.
    """

    def __init__(self, sites: IndexSites) -> None:
        self._sites = sites
        self.flag: torch.Tensor | None = None

    def note(self, index: torch.Tensor, allowed: IndexRange, line: Callable[[], str]) -> None:
        """Takes note of a tensor of indices on the devices; the first that lies outside is kept."""
        flag = self._sites.flag(index, allowed, line())
        if flag is not None:
            self.flag = flag if self.flag is None else first_flag(self.flag, flag)


def _text(where: str, allowed: IndexRange, index: int) -> str:
    fix = (
        "An id outside of a vocabulary means a tokenizer with more tokens than the embedding has "
        "rows (resize_token_embeddings), or padding that is no id"
    )
    if allowed.what == LABEL:
        fix = "A label that doesn't count is ignore_index, -100 unless the loss is told another"
        fix += f"; {allowed.size} classes are too few for {index}" if index > 0 else ""
    what = allowed.what if " " in allowed.what else f"an index of {allowed.what}"
    return (
        f"{where}: {what} is {index}, outside of {allowed.lowest} to {allowed.size - 1}. A "
        "compiled program can't stop there, so steps were made with wrong numbers (NaN, or another "
        f"element) since the devices were last asked. {fix}"
    )
