"""Runs a script or a module in this process as `python` would run it."""

import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import spmdzero
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError

_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(spmdzero.__file__))
# Modules whose frames are above those of the script.
_NOT_THE_SCRIPTS = ("runpy", __name__)


def run_as_main(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Runs `target` as ``__main__``, and shows its exceptions as Python shows them.

    Args:
        target: path of a script, the name of a module, or of a command that is a Python script.
        arguments: the script's arguments in `sys.argv`.
        module: whether `target` is a module's name, as after ``python -m``.

    Raises:
        SpmdZeroUsageError: there is no such script or module.
        SystemExit: with the script's own code; with 1 after any other exception, with 130 after
            Ctrl-C.
    """
    if not module and not os.path.exists(target):
        target = _command(target)
    _first_on_the_path("" if module else os.path.dirname(os.path.realpath(target)))
    sys.argv = [target, *arguments]
    if module:
        _require_module(target)
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            # The path is absolute, as Python makes it: a script may change folders and then look
            # for its own file.
            runpy.run_path(os.path.abspath(target), run_name="__main__")
    except (Exception, KeyboardInterrupt) as error:
        _exit_as_python(error)


def _first_on_the_path(folder: str) -> None:
    """Puts the script's folder first on the path, in place of the running command's folder."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder or os.getcwd()


def _command(name: str) -> str:
    """The file of a command that packages have put on the path, as `accelerate` or `trl`."""
    # Commands of this Python's environment may not be on the path.
    here = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    found = None if os.path.dirname(name) else shutil.which(name, path=here)
    if found is None:
        raise SpmdZeroUsageError(
            f"{name}: no such file in {os.getcwd()}, and no command of that name"
        )
    with open(found, "rb") as file:
        # With a long path to Python pip lets sh run a script, which names it in the second line.
        head = file.read(400)
    if not (head.startswith(b"#!") and b"python" in head):
        raise SpmdZeroUsageError(
            f"{name}: {found} is no Python script. Take the script or the module that it runs, "
            "such as `spmdzero run -m package.module`"
        )
    return found


def _require_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        # The missing module is a package that would hold `name`.
        found = None
    if found is None:
        raise SpmdZeroUsageError(f"no module named {name!r}, seen from {os.getcwd()}")


def _cut_at_the_first_library(trace: TracebackType | None) -> None:
    """Leaves out a client's frames, thirty of which would hide the message of a refused key."""
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_next.tb_frame.f_code.co_filename
        if "site-packages" in file or file.startswith(_LIBRARIES):
            trace.tb_next = None
        trace = trace.tb_next


def _exit_as_python(error: BaseException) -> NoReturn:
    """Shows an exception by `sys.excepthook`, which the script may have set, from its frames on."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _NOT_THE_SCRIPTS:
        trace = trace.tb_next
    if isinstance(error, SpmdZeroConfigError):
        _cut_at_the_first_library(trace)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from error
