"""Whether an upload is the same on all hosts, or each host's own."""

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0


_thread = _Thread()


@contextlib.contextmanager
def same_on_hosts() -> Iterator[None]:
    """Context in which this thread's uploads are the same on all hosts: spmdzero makes them."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def are_the_same() -> bool:
    """Whether this thread's uploads are the same on all hosts."""
    return bool(_thread.depth)
