"""What a process tells the launcher that started it: lines of its stderr, which are not printed.

A launcher reaches other hosts by ssh, through which nothing comes but a status and these streams.
"""

import contextlib
import dataclasses
import json
import os
from typing import Any

_MARK = "\x1espmdzero "
_STDERR = 2
WATCHES = "watches"
"""What a process tells once it sees by itself that another host is gone, and says so."""


@dataclasses.dataclass
class _Launcher:
    """Attributes.

    process: the one that is listened to, and none that is forked from it.
    elastic: whether it may start fewer hosts after a failure.
    restart: how often it has started the job before.
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
    """Tells it to the launcher, if there is one; `value` is of JSON's kinds."""
    if _launcher.process == os.getpid():
        line = f"{_MARK}{json.dumps([what, value])}\n"
        with contextlib.suppress(OSError):
            # One write: lines of other threads come before or after it, up to 4,096 bytes.
            os.write(_STDERR, line.encode())


def heard(line: str) -> tuple[str, tuple[str, Any] | None]:
    """What of a line is to be printed, and what it tells a launcher."""
    before, mark, told = line.partition(_MARK)
    if not mark:
        return line, None
    try:
        what, value = json.loads(told)
    except (ValueError, TypeError):
        # Another process of the host wrote into it.
        return line, None
    return before, (what, value)
