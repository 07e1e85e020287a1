"""Compiles functions that are written in Python: see `spmdzero.backend.Compiler`."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch

from spmdzero.backend.forms._stand_ins import nothing_outlives
from spmdzero.backend.jax.graph._folded import fold, same_value, stand_in
from spmdzero.backend.jax.graph._repeats import beginning, build, keep, tensors
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._cells import cells
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._generator import Draws, generator
from spmdzero.backend.jax.lazy._tensor import DEVICE, over
from spmdzero.backend.jax.lazy._values import Value, latest_serial

__all__ = [
    "beginning",
    "build",
    "drawing",
    "fold",
    "handles",
    "keep",
    "no_stand_in_left",
    "record_uploads",
    "same_value",
    "stand_in",
    "take_seed",
    "tensors",
    "unknown_values",
]


def take_seed() -> torch.Tensor:
    """The next seed of the devices' own generator, 0-dim int32; no other draw gets it."""
    return over(_host.seed(generator.take()))


def drawing(seed: torch.Tensor, *, first: int = 0) -> contextlib.AbstractContextManager[Draws]:
    """Context in which draws from the devices' own generator take `seed`, numbered from `first`."""
    return generator.drawing(value_of(seed), first=first)


def handles(tensors: Sequence[torch.Tensor]) -> list[int]:
    """An id of the memory of each computed tensor; tensors that share memory have the same."""
    return [value_of(tensor).serial for tensor in tensors]


def no_stand_in_left() -> contextlib.AbstractContextManager[None]:
    """Context around code that calls `fold`: no tensor computed from a stand-in outlives it.

    Raises:
        StandInKeptError: some code kept such a tensor, which was taken from it.
    """
    return nothing_outlives(lambda: _Kept(latest_serial()))


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Live tensors that hold stand-ins, or values computed from them.

    Attributes:
        since: only values with a higher serial count.
    """

    since: int

    def _is_meant(self, value: Value) -> bool:
        return value.stand_in and value.serial > self.since

    def is_any(self) -> bool:
        """Whether there are such tensors."""
        return any(self._is_meant(cell.value) for cell in cells())

    def replace(self) -> None:
        """Puts zeros in the place of their values."""
        for cell in cells():
            value = cell.value
            if self._is_meant(value):
                cell.value = value_of(torch.zeros(value.shape, dtype=value.dtype, device=DEVICE))


class Uploads(set[int]):
    """Serials of the recorded uploads; `since` is the serial of the latest value before."""

    def __init__(self) -> None:
        super().__init__()
        self.since = latest_serial()


@contextlib.contextmanager
def record_uploads() -> Iterator[Uploads]:
    """Context that records each upload inside."""
    uploads = Uploads()
    _host.traffic.uploads.append(uploads)
    try:
        yield uploads
    finally:
        # `remove` would take the first set that is equal, which may be another one.
        _host.traffic.uploads.pop()


def unknown_values(
    inputs: Sequence[torch.Tensor], uploads: Uploads, *, known: Collection[int] = ()
) -> list[torch.Tensor]:
    """The constants of a folded function that may differ when it runs again.

    Args:
        inputs: the constants.
        uploads: those recorded since the trace began.
        known: handles of other constants that stay the same.
    """
    handle_of = zip(inputs, handles(inputs), strict=True)
    return [tensor for tensor, handle in handle_of if not (handle in known or handle in uploads)]
