"""What C++ prints and nobody asked for."""

import contextlib
import os
import sys
from collections.abc import Iterator

_GLOO = b"[Gloo] Rank "


@contextlib.contextmanager
def without_gloos_line() -> Iterator[None]:
    """Leaves out the line that gloo prints for each group; all else is printed.

    It comes from C++, below `sys.stdout`, and no level of logging turns it off.
    """
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
                if not line.startswith(_GLOO):
                    os.write(1, line)
