"""How long processes wait for each other before they can watch each other."""

import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Iterator

from spmdzero.backend.hosts._watch import STATUS

# After the time limit of what is waited for, which says more where it holds.
_LATER = 5.0


@contextlib.contextmanager
def meeting(timeout: datetime.timedelta) -> Iterator[None]:
    """Ends this process where the body takes longer: the others can't be told, nor asked.

    torch's store waits for ever for the answer of a process that stands still: its own time limit
    is for one that isn't there.
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
