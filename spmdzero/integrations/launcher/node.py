"""One host's process of a job: runs the script, and ends when its launcher does.

`spmdzero launch` starts `python -m spmdzero.integrations.launcher.node [--elastic] [-m] SCRIPT ...`
on each host. The launcher holds the other end of stdin, through ssh too, and writes into it when
another host has ended.
"""

import os
import signal
import sys
import threading
import time
from types import TracebackType

from spmdzero import _to_launcher
from spmdzero.backend.hosts._watching import watch
from spmdzero.errors import HostsDifferError, SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.integrations import install
from spmdzero.integrations._as_main import run_as_main
from spmdzero.integrations.launcher._commands import ELASTIC, RESTART
from spmdzero.integrations.launcher._job import HOSTS_DIFFER

_MODULE = "-m"
_TO_END = 3.0
# Largest number of characters of a reported error; JSON makes at most six bytes of each.
_LONGEST = 500
# Errors that a new start of the same script would raise again.
_REPEATED = (SpmdZeroConfigError, SpmdZeroUsageError, ImportError, SyntaxError)


def main() -> None:
    """Runs the script in this process.

    Raises:
        SystemExit: with the script's own code; 2 if there is no such script.
    """
    launcher = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    words = sys.argv[1:]
    elastic = words[0] == ELASTIC
    _to_launcher.begin(elastic=elastic, restart=int(os.environ[RESTART]))
    words = words[elastic:]
    module = words[0] == _MODULE
    script, *arguments = words[1:] if module else words
    _leave_to_the_first_what_all_raise()
    try:
        install()
        run_as_main(script, arguments, module=module)
    except SpmdZeroUsageError as error:
        print(f"spmdzero launch: {error}", file=sys.stderr)
        _tell_failure(error)
        sys.exit(2)
    except SystemExit as end:
        if end.__cause__ is not None:
            _tell_failure(end.__cause__)
        elif end.code:
            _tell_failure(end)
        raise


def _leave_to_the_first_what_all_raise() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get("RANK") == "0" or not isinstance(error, HostsDifferError):
            before(kind, error, trace)

    sys.excepthook = hook


def _tell_failure(error: BaseException) -> None:
    if isinstance(error, HostsDifferError):
        # The first host prints the rest, once for all hosts.
        _to_launcher.tell("failed", (HOSTS_DIFFER, True))
        return
    first_line = (str(error).splitlines() or [""])[0]
    said = f"{type(error).__name__}: {first_line}"[:_LONGEST]
    _to_launcher.tell("failed", (said, isinstance(error, _REPEATED)))


def _end_with(launcher: int) -> None:
    while os.read(launcher, 1):
        # The launcher writes that another host has ended. This host may be waiting for that host on
        # its devices, where no exception is raised.
        watched = watch()
        if watched is not None:
            watched.suspect()
    os.kill(os.getpid(), signal.SIGTERM)
    # JAX takes SIGTERM for a notice that the machine will be gone, and may not end.
    time.sleep(_TO_END)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
