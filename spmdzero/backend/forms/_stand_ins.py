"""Tensors computed from inputs without data, which must not outlive the trace that made them."""

import contextlib
import gc
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Protocol

from spmdzero.backend.protocols._compiler import StandInKeptError


class Kept(Protocol):
    """The tensors of a trace that are alive."""

    def is_any(self) -> bool:
        """Whether any traced tensor is alive."""

    def replace(self) -> None:
        """Replaces all of them with tensors that have values."""


@contextlib.contextmanager
def nothing_outlives(watch: Callable[[], Kept]) -> Iterator[None]:
    """Context around a trace: see `Compiler.no_stand_in_left`.

    Args:
        watch: starts watching the tensors that are made from then on.

    Raises:
        StandInKeptError: some code kept such a tensor, which was taken from it.
    """
    collects = gc.isenabled()
    # A collection during the trace would falsify the count of tensors that existed before it.
    gc.disable()
    try:
        kept = watch()
        try:
            yield
        except BaseException as error:
            # Whoever keeps the error, as Jupyter does, would keep the frames that it passed
            # through.
            for frame, _ in traceback.walk_tb(error.__traceback__):
                _empty(frame)
            _take_back(kept)
            raise
        if _take_back(kept):
            raise StandInKeptError
    finally:
        if collects:
            gc.enable()


def _take_back(kept: Kept) -> bool:
    if not kept.is_any():
        return False
    gc.collect()
    if not kept.is_any():
        return False
    kept.replace()
    return True


def _empty(frame: types.FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:
        return  # running
    # Python keeps a frame's locals as a dict once they were read; reading them again empties it.
    _ = frame.f_locals
