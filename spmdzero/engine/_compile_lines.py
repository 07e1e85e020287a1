"""Lines around a compilation that takes long: what the silence is, and how long it was."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from spmdzero.engine._programs import Compiled

logger = logging.getLogger("spmdzero")
LONG = 5.0
"""Seconds of silence that are explained."""


@contextlib.contextmanager
def explained(what: str, *, often: str = "", new: bool = True) -> Iterator[None]:
    """Around what may compile: logs so once it has taken `LONG`, and at its end how long it took.

    A thread says it, as the compiler keeps the one that calls it.

    Args:
        what: that is, such as ``"the step"``.
        often: how often it is compiled.
        new: whether it never was. Of others nothing is said: they may wait for what is before them.
    """
    if not new:
        yield
        return
    said = f"compiling {what}{often and ', '}{often} ..."
    timer = threading.Timer(LONG, _say, args=(said,))
    timer.daemon = True
    before = Compiled.so_far()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # A line that is on its way would stand below the next.
        timer.join()
        compiled = Compiled.so_far() - before
        if compiled.count and compiled.seconds >= LONG:
            logger.info("compiled %s in %.1f s", what, compiled.seconds)


def _say(line: str) -> None:
    # From a file of this package: other hosts than the first leave its lines out.
    logger.info("%s", line)
