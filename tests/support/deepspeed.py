"""Starts a program as real DeepSpeed's ranks: one process each, gloo, no launcher."""

import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.harness.ranks import rank_environments
from tests.support.processes import environment


def require_deepspeed() -> None:
    """Fails, rather than skips: without its peer a comparison says nothing."""
    assert importlib.util.find_spec("deepspeed"), (
        "real DeepSpeed is not installed, which this test compares with: pip install -e '.[oracle]'"
    )


def run_ranks(arguments: list[str], *, ranks: int, cwd: Path, timeout: float) -> list[str]:
    """Runs `python *arguments` once for each rank; returns what each printed, by rank.

    Raises:
        AssertionError: DeepSpeed is missing, or a rank failed or ran past `timeout` seconds; holds
            the end of what it wrote.
    """
    require_deepspeed()
    left = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS")
    inherited = {name: value for name, value in environment().items() if name not in left}
    processes: list[subprocess.Popen[bytes]] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        rank_environments(ranks, threads=1) as environments,
    ):
        folder = Path(scratch)
        try:
            for rank, told in enumerate(environments):
                with (
                    (folder / f"{rank}.out").open("wb") as out,
                    (folder / f"{rank}.err").open("wb") as err,
                ):
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, *arguments],
                            cwd=cwd,
                            env=inherited | told,
                            stdout=out,
                            stderr=err,
                        )
                    )
            _wait(processes, folder, timeout=timeout)
            return [(folder / f"{rank}.out").read_text() for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, *, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        # In any order: when one rank fails, the others wait for it in a collective.
        for rank, code in enumerate(codes):
            assert code in (0, None), f"rank {rank} ended with {code}:\n{_tail(folder, rank)}"
        if None not in codes:
            return
        assert time.monotonic() < end, f"no end after {timeout} s:\n{_tail(folder, 0)}"
        time.sleep(0.1)


def _tail(folder: Path, rank: int) -> str:
    return "\n".join(
        (folder / f"{rank}.{stream}").read_text(errors="replace")[-3000:]
        for stream in ("out", "err")
    )
