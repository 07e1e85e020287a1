"""Suppresses useless lines that C++ prints."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# Gloo prints its lines in pieces, and the pieces of several devices' threads alternate.
_GLOOS_LINE = re.compile(
    rb"(?=.*[a-z])(?:\[Gloo\] Rank |\d+| is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )+\n?"
)
# With two threads inside, each would restore the other's redirection.
_redirecting = threading.RLock()


@contextlib.contextmanager
def without_gloos_lines() -> Iterator[None]:
    """Context in which the line that gloo prints for each group of devices is left out.

    It comes from C++, below `sys.stdout`, and no level of logging turns it off. All else is
    printed.
    """
    with _redirecting:
        yield from _redirected()


def _redirected() -> Iterator[None]:
    with contextlib.suppress(AttributeError, ValueError):
        # stdout is None without a console, and some programs close it.
        sys.stdout.flush()
    try:
        before = os.dup(1)
    except OSError:
        # There is no file descriptor 1: nothing that is printed is seen.
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
