"""A time limit for processes that wait for each other and can't watch each other yet."""

import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Iterator

from spmdzero.backend.hosts._watch import STATUS

# Seconds after the time limit of the operation itself, whose error says more.
_LATER = 5.0


@contextlib.contextmanager
def meeting(timeout: datetime.timedelta) -> Iterator[None]:
    """Ends this process if the body takes longer: it can neither ask nor tell the others.

    torch's store waits for ever for the answer of a process that stands still: its own time limit
    holds only for a process that isn't there.
    """
    seconds = timeout.total_seconds()
    timer = threading.Timer(seconds + _LATER, _end, args=(seconds,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(seconds: float) -> None:
    print(
        f"spmdzero: host {os.environ.get('RANK', '?')} has not met the others in {seconds:g} s: "
        f"one of them stands still, or isn't reached. It ends with status {STATUS}.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(STATUS)
