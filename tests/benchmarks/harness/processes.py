"""Processes that run beside each other: one that fails ends all.

The tests that compare with real DeepSpeed start its ranks with this too.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


class ProcessFailedError(Exception):
    """One of several processes failed, or ran too long.

    Attributes:
        ended: which, and how.
        log: the end of what it printed, and of its errors.
    """

    def __init__(self, ended: str, log: str) -> None:
        super().__init__(f"{ended}:\n{log}")
        self.ended, self.log = ended, log

    @property
    def headline(self) -> str:
        """How it ended, and its last line, which names an error that was raised."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        return f"{self.ended}: {lines[-1] if lines else 'no output'}"


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    *,
    cwd: Path,
    folder: Path,
    timeout: float,
) -> None:
    """Runs `python *command` for each command and environment, to the end of all.

    The i-th process prints to `i.out` of `folder` and its errors to `i.err`.

    Raises:
        ProcessFailedError: one failed, or all together ran past `timeout` seconds.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            with (folder / f"{i}.out").open("wb") as out, (folder / f"{i}.err").open("wb") as err:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command], cwd=cwd, env=environment, stdout=out, stderr=err
                    )
                )
        failed = _first_failed(processes, timeout)
        if failed is not None:
            code = processes[failed].poll()
            ended = f"no end after {timeout} s" if code is None else f"exit status {code}"
            raise ProcessFailedError(f"process {failed}, {ended}", _log(folder, failed))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _first_failed(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """In any order: when one fails, the others wait for it in a collective."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        bad = next((i for i, code in enumerate(codes) if code not in (0, None)), None)
        if bad is not None or None not in codes:
            return bad
        if time.monotonic() > end:
            return codes.index(None)
        time.sleep(0.05)


def _log(folder: Path, index: int) -> str:
    return "\n".join(
        (folder / f"{index}.{stream}").read_text(errors="replace")[-3000:]
        for stream in ("out", "err")
    )
