"""Runs Python files one after the other, each in a process that has imported spmdzero already.

Importing torch, torch_xla and spmdzero takes two thirds of the time of a page's code, and is the
same for each page. Run as a program, it reads jobs as lines of JSON, forks for each, and answers
with a line each. XLA is started in the fork, by the page.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn


class WarmPython:
    """`python file` with a head start; what a process of its own prints, and how it ends."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, file: Path, *, cwd: Path, timeout: int = 300) -> subprocess.CompletedProcess[str]:
        """Runs a file as `__main__` in a folder; killed after `timeout` seconds."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            printed = Path(folder, "stdout"), Path(folder, "stderr")
            job = {
                "file": str(file),
                "cwd": str(cwd),
                "timeout": timeout,
                "to": [str(path) for path in printed],
            }
            print(json.dumps(job), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            stdout, stderr = (path.read_text() for path in printed)
        return subprocess.CompletedProcess([str(file)], code, stdout, stderr)


@contextlib.contextmanager
def warm_python(environment: dict[str, str]) -> Iterator[WarmPython]:
    """The process that forks, in this environment; ends with the block."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    # Closes its input, on which it ends, and waits for it.
    with server:
        yield WarmPython(server)


def serve() -> None:
    """Answers each job with the exit status of its fork."""
    # Not the folder of this file: that of the page's code comes first.
    sys.path.pop(0)
    import spmdzero.cli  # noqa: F401

    # The forks share what is there, and don't look through it for what can be freed.
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(job)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(job: dict[str, Any]) -> NoReturn:
    """Runs the job in this process, which is a fork, and ends it."""
    signal.alarm(job["timeout"])
    for stream, path in zip((sys.stdout, sys.stderr), job["to"], strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.chdir(job["cwd"])
    sys.path.insert(0, str(Path(job["file"]).parent))
    try:
        runpy.run_path(job["file"], run_name="__main__")
        code = 0
    except BaseException as error:
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    # What Python does at the end of a program, without taking apart the modules of the server.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
