"""Messages of a process to its launcher: lines of stderr, which the launcher doesn't print.

A launcher reaches other hosts by ssh, which only passes on a status and these streams.
"""

import contextlib
import dataclasses
import json
import os
from typing import Any

_MARK = "\x1espmdzero "
_STDERR = 2
WATCHES = "watches"
"""The message of a process that itself notices and reports the end of other hosts."""


@dataclasses.dataclass
class _Launcher:
    """The launcher of this process.

    Attributes:
        process: id of the process whose messages count; processes forked from it send none.
        elastic: whether the launcher may start fewer hosts after a failure.
        restart: number of earlier starts of the job.
    """

    process: int | None = None
    elastic: bool = False
    restart: int = 0


_launcher = _Launcher()


def begin(*, elastic: bool, restart: int) -> None:
    """Takes note that this process has a launcher that reads its lines."""
    _launcher.process, _launcher.elastic, _launcher.restart = os.getpid(), elastic, restart


def is_elastic() -> bool:
    """Whether this process was started by a launcher that may start fewer hosts after a failure."""
    return _launcher.elastic


def is_first_start() -> bool:
    """Whether the launcher hasn't started the job before."""
    return _launcher.restart == 0


def tell(what: str, value: Any) -> None:
    """Sends `value`, a JSON value, to the launcher as a message `what`, if there is a launcher."""
    if _launcher.process == os.getpid():
        line = f"{_MARK}{json.dumps([what, value])}\n"
        with contextlib.suppress(OSError):
            # One write of up to 4,096 bytes isn't mixed with lines of other threads.
            os.write(_STDERR, line.encode())


def heard(line: str) -> tuple[str, tuple[str, Any] | None]:
    """The part of a line to print, and the message to the launcher in it, or None."""
    before, mark, told = line.partition(_MARK)
    if not mark:
        return line, None
    try:
        what, value = json.loads(told)
    except (ValueError, TypeError):
        # Another process of the host has written into the line.
        return line, None
    return before, (what, value)
