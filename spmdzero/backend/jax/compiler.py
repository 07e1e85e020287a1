"""Python made programs: see `spmdzero.backend.Compiler`."""

import contextlib
import gc
import traceback
import types
from collections.abc import Collection, Iterator, Sequence

import torch

from spmdzero.backend._compiler import StandInKeptError
from spmdzero.backend.jax import _host, runtime
from spmdzero.backend.jax._alone import compile_alone
from spmdzero.backend.jax._cells import cells
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._folded import Constant, fold, same_value, stand_in
from spmdzero.backend.jax._tensor import LazyTensor
from spmdzero.backend.jax._values import latest_serial

__all__ = [
    "compile_alone",
    "fold",
    "no_stand_in_left",
    "record_uploads",
    "same_value",
    "stand_in",
    "start_pending",
    "strangers",
]


@contextlib.contextmanager
def no_stand_in_left() -> Iterator[None]:
    """Around code that calls `fold`: nothing that was computed from a stand-in outlives it.

    Raises:
        StandInKeptError: something had to be taken from somebody who kept it.
    """
    since = latest_serial()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except BaseException as error:
        # Whoever keeps the error, as Jupyter does, would keep the frames that it came through.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _empty(frame)
        _let_go(since)
        raise
    else:
        if _let_go(since):
            raise StandInKeptError
    finally:
        if collects:
            gc.enable()


def _kept(since: int) -> bool:
    return any(cell.value.stand_in and cell.value.serial > since for cell in cells())


def _let_go(since: int) -> bool:
    if not _kept(since):
        return False
    gc.collect()
    if not _kept(since):
        return False
    for found in gc.get_objects():
        if not issubclass(type(found), LazyTensor):
            continue
        value = found.cell.value
        if value.stand_in and value.serial > since:
            found.cell.value = value_of(torch.zeros(value.shape, dtype=value.dtype, device="xla"))
    return True


def _empty(frame: types.FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:
        return  # running
    # Read once, the locals of a frame are kept as a dict, which reading them again empties.
    _ = frame.f_locals


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


def strangers(
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
