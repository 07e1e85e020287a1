"""Saves while training goes on: one save at a time, in order, none forgotten."""

import concurrent.futures
import logging
import weakref
from collections.abc import Callable

logger = logging.getLogger("spmdzero")


class BackgroundSaver:
    """Runs one save at a time in a thread beside the caller.

    The interpreter waits at its end for a running save. A failure is raised by the next call, or
    logged at the interpreter's end if no call follows.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="spmdzero-save")
        self._under_way: list[concurrent.futures.Future[None]] = []
        weakref.finalize(self, _log_failure, self._under_way)

    def start(self, save: Callable[[], None]) -> None:
        """Starts a save when the one before has ended.

        Raises the error of the save before; then the new save is not started.
        """
        self.wait()
        self._under_way.append(self._pool.submit(save))

    def wait(self) -> None:
        """Waits for the running save, and raises its error."""
        if self._under_way:
            self._under_way.pop().result()


def _log_failure(under_way: list[concurrent.futures.Future[None]]) -> None:
    for future in under_way:
        error = future.exception()
        if error is not None:
            logger.error("the last asynchronous save failed: %s", error)
