"""Python made programs: see `spmdzero.backend.Compiler`."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch

from spmdzero.backend.forms._stand_ins import nothing_outlives
from spmdzero.backend.jax import _host, runtime
from spmdzero.backend.jax._alone import compile_alone
from spmdzero.backend.jax._cells import cells
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._folded import Constant, fold, same_value, stand_in
from spmdzero.backend.jax._tensor import DEVICE
from spmdzero.backend.jax._values import Value, latest_serial

__all__ = [
    "compile_alone",
    "fold",
    "no_stand_in_left",
    "record_uploads",
    "same_value",
    "stand_in",
    "start_pending",
    "unknown_values",
]


def no_stand_in_left() -> contextlib.AbstractContextManager[None]:
    """Around code that calls `fold`: nothing that was computed from a stand-in outlives it.

    Raises:
        StandInKeptError: something had to be taken from somebody who kept it.
    """
    return nothing_outlives(lambda: _Kept(latest_serial()))


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What live tensors hold of stand-ins, and of what is computed from them.

    Attributes:
        since: serials of what is meant are higher.
    """

    since: int

    def _is_meant(self, value: Value) -> bool:
        return value.stand_in and value.serial > self.since

    def is_any(self) -> bool:
        """Whether they hold any."""
        return any(self._is_meant(cell.value) for cell in cells())

    def replace(self) -> None:
        """Puts zeros in its place."""
        for cell in cells():
            value = cell.value
            if self._is_meant(value):
                cell.value = value_of(torch.zeros(value.shape, dtype=value.dtype, device=DEVICE))


class Uploads(set[int]):
    """Serials of what was uploaded; `since` is that of the latest value before."""

    def __init__(self) -> None:
        super().__init__()
        self.since = latest_serial()


@contextlib.contextmanager
def record_uploads() -> Iterator[Uploads]:
    """Takes down each upload inside."""
    uploads = Uploads()
    _host.traffic.uploads.append(uploads)
    try:
        yield uploads
    finally:
        # `remove` would take the first that is equal, as sets are that hold the same.
        _host.traffic.uploads.pop()


def unknown_values(
    inputs: Sequence[Constant], uploads: Uploads, *, known: Collection[int] = ()
) -> list[Constant]:
    """Those constants of a folded function that may be something else when it runs again.

    Args:
        inputs: the constants.
        uploads: since the trace began.
        known: handles of others that are none.
    """
    return [c for c in inputs if c.is_seed or not (c.handle in known or c.handle in uploads)]


def start_pending(device: torch.device) -> None:
    """Starts what is recorded."""
    runtime.sync()
