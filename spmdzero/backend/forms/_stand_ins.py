"""What is computed from inputs without data: it must not outlive the trace that it was made in."""

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
        """Puts values in the place of all of them."""


@contextlib.contextmanager
def nothing_outlives(watch: Callable[[], Kept]) -> Iterator[None]:
    """Around a trace: see `Compiler.no_stand_in_left`.

    Args:
        watch: begins to watch what is made from then on.

    Raises:
        StandInKeptError: something had to be taken from somebody who kept it.
    """
    collects = gc.isenabled()
    # What it would let go of meanwhile would be missing from a count of what there was before.
    gc.disable()
    try:
        kept = watch()
        try:
            yield
        except BaseException as error:
            # Whoever keeps the error, as Jupyter does, would keep the frames that it came through.
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
    # Read once, the locals of a frame are kept as a dict, which reading them again empties.
    _ = frame.f_locals
