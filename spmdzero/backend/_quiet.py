"""What C++ prints and nobody asked for."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# What it prints piece by piece, each device's thread between those of the others.
_GLOOS_LINE = re.compile(
    rb"(?=.*[a-z])(?:\[Gloo\] Rank |\d+| is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )+\n?"
)
# Two threads would each put back what the other has put there.
_redirecting = threading.RLock()


@contextlib.contextmanager
def without_gloos_lines() -> Iterator[None]:
    """Leaves out the line that gloo prints for each group of devices; all else is printed.

    It comes from C++, below `sys.stdout`, and no level of logging turns it off.
    """
    with _redirecting:
        yield from _redirected()


def _redirected() -> Iterator[None]:
    with contextlib.suppress(AttributeError, ValueError):
        # It is None without a console, and some programs close it.
        sys.stdout.flush()
    try:
        before = os.dup(1)
    except OSError:
        # Nothing that is printed is seen.
        yield
        return
    with os.fdopen(os.memfd_create("printed"), "w+b") as printed:
        os.dup2(printed.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(before, 1)
            os.close(before)
            printed.seek(0)
            for line in printed:
                if not _GLOOS_LINE.fullmatch(line):
                    os.write(1, line)
