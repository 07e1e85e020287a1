"""Python processes with a head start: forks of one that has imported spmdzero.

Importing torch, torch_xla and spmdzero takes five seconds, most of the time of a short child. XLA
is started in the fork, with the devices that this is to have.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_DEVICES = "CPU_NUM_DEVICES"


def run_warm(
    *arguments: str, cwd: Path, environment: dict[str, str], timeout: int
) -> subprocess.CompletedProcess[str]:
    """What `python` with these arguments prints, and how it ends; killed after `timeout` seconds.

    Args:
        arguments: ``-W error`` or nothing, and ``-c``, ``-m`` or a file with its arguments.
        cwd, environment: of the fork. Imports have seen all of the environment but the number of
            devices, so there is a process to fork from for each that is otherwise another.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "stdout"), Path(folder, "stderr")
        job = _job(arguments, cwd, environment, timeout, printed)
        code = _Server.of(_rest(environment)).run(job)
        stdout, stderr = (path.read_text() for path in printed)
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


class WarmProcess:
    """A fork that runs beside others: what `python` with these arguments does.

    Args:
        arguments, cwd, environment, timeout: as of `run_warm`.
        variables: more of its environment, which no import reads.

    Attributes:
        pid: of the fork, which leads a session of its own.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        environment: dict[str, str],
        variables: dict[str, str],
        timeout: int,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        files = (Path(self._folder.name, name) for name in ("stdout", "stderr", "status"))
        *self._printed, self._status = files
        job = _job(arguments, cwd, environment, timeout, self._printed)
        more = {"variables": variables, "status": str(self._status)}
        self.pid = _Server.of(_rest(environment)).run({**job, **more})

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    def wait(self, timeout: float) -> int:
        """Its exit status.

        Raises:
            TimeoutExpired: it still runs.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.02)
        return status

    def said(self) -> tuple[str, str]:
        """What it has printed so far, to stdout and to stderr."""
        out, errors = (path.read_text(errors="replace") for path in self._printed)
        return out, errors

    def end(self) -> None:
        """Ends it and what it started, whatever it does."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(60)
        self._folder.cleanup()


def _rest(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in environment.items() if k != _DEVICES))


def _job(
    arguments: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    timeout: int,
    printed: Sequence[Path],
) -> dict[str, Any]:
    for path in printed:
        path.touch()
    return {
        "arguments": arguments,
        "cwd": str(cwd),
        "devices": environment[_DEVICES],
        "timeout": timeout,
        "printed": [str(path) for path in printed],
    }


class _Server:
    def __init__(self, environment: tuple[tuple[str, str], ...]) -> None:
        import spmdzero

        # What the forks find is the spmdzero that is tested: `make test-pythons` installs one.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(Path(spmdzero.__file__).parents[1])],
            env=dict(environment),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.close)

    @classmethod
    @functools.cache
    def of(cls, environment: tuple[tuple[str, str], ...]) -> "_Server":
        """The one of this environment, which ends with the tests."""
        return cls(environment)

    def run(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        # It ends when its input does.
        self._process.communicate()


def serve() -> None:
    """Answers each job, a line of JSON: with the exit status of its fork, or at once its id."""
    sys.path[0] = sys.argv[1]
    import torch

    import spmdzero.integrations

    spmdzero.backend.current()
    # The first of a process imports torch's compiler.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    del sys.path[0]
    # The forks share what is there, and don't look through it for what can be freed.
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _attend(job) if "status" in job else _become(job)
        _, status = os.waitpid(child, 0)
        if "status" not in job:
            print(os.waitstatus_to_exitcode(status), flush=True)


def _attend(job: dict[str, Any]) -> NoReturn:
    """Forks once more, answers with the id of that process, and writes down how it ends."""
    if os.fork():
        # The server waits for this one only.
        os._exit(0)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ.update(job["variables"])
        _become(job)
    print(child, flush=True)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout):
        os.dup2(nothing, stream.fileno())
    _, status = os.waitpid(child, 0)
    file = Path(job["status"])
    if file.parent.exists():
        part = file.with_suffix(".part")
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.rename(file)
    os._exit(0)


def _become(job: dict[str, Any]) -> NoReturn:
    """Runs the job in this process, which is a fork, and ends it."""
    signal.alarm(job["timeout"])
    os.environ[_DEVICES] = job["devices"]
    for stream, path in zip((sys.stdout, sys.stderr), job["printed"], strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.chdir(job["cwd"])
    code = 0
    try:
        _run(job["arguments"])
    except BaseException as error:
        code = 1
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        else:
            # Which may be another's by now.
            sys.excepthook(type(error), error, error.__traceback__)
    # What Python does at the end of a program, without taking the server's modules apart.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(arguments: list[str]) -> None:
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        arguments = arguments[2:]
    kind, *rest = arguments
    if kind == "-c":
        source, *sys.argv = rest[0], "-c", *rest[1:]
        sys.path.insert(0, "")
        exec(compile(source, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve()
