"""Processes that are hosts of one job: starts them, and collects what they print as JSON."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, environment, free_port


class Host:
    """One process of a job.

    Attributes:
        rank: its place.
        process: as `subprocess` has it.
    """

    def __init__(self, rank: int, command: Sequence[str], variables: dict[str, str]) -> None:
        self.rank = rank
        # In files: who writes into a full pipe stands still, and the others with it.
        self._out, self._errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115

        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**variables),
            stdout=self._out,
            stderr=self._errors,
            start_new_session=True,
        )

    def said(self) -> tuple[str, str]:
        """What it has printed so far, to stdout and to stderr."""
        texts = []
        for file in (self._out, self._errors):
            file.flush()
            texts.append(os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace"))
        return texts[0], texts[1]

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        return self.process.wait(timeout)

    def result(self) -> Any:
        """What it printed as JSON in its last line."""
        return json.loads(self.said()[0].splitlines()[-1])

    def end(self) -> None:
        """Ends it, whatever it does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._out.close()
        self._errors.close()


def by_torchrun(rank: int, count: int, port: str) -> dict[str, str]:
    """The variables by which processes find each other that torchrun or DeepSpeed started."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def by_slurm(rank: int, count: int, port: str) -> dict[str, str]:
    """Those by which JAX finds the processes of a job of Slurm's; it makes a port of the number."""
    return {
        "SLURM_JOB_ID": port,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


@contextlib.contextmanager
def hosts(
    module: str,
    *arguments: str,
    count: int,
    devices: int,
    place: Callable[[int, int, str], dict[str, str]] = by_torchrun,
    **variables: str,
) -> Iterator[list[Host]]:
    """`count` processes of `python -m module`, of `devices` virtual devices each.

    They find each other by `place(rank, count, port)`. Those that still run at the end are ended.
    """
    common = {
        "SPMDZERO_BACKEND": "jax",
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        **variables,
    }
    port = free_port()
    command = (sys.executable, "-m", module, *arguments)
    started = [Host(rank, command, common | place(rank, count, port)) for rank in range(count)]
    try:
        yield started
    finally:
        for host in started:
            host.end()


def run_hosts(
    module: str, *arguments: str, count: int, devices: int, timeout: float = 600, **how: Any
) -> list[Any]:
    """What each of the processes prints as JSON; all have to succeed."""
    with hosts(module, *arguments, count=count, devices=devices, **how) as started:
        for host in started:
            status = host.wait(timeout)
            assert status == 0, f"host {host.rank}: {status}\n{host.said()[1][-4000:]}"
        return [host.result() for host in started]


def told(value: Any) -> str:
    """An argument that a module of these tests reads as JSON."""
    return json.dumps(value, default=lambda item: str(item) if isinstance(item, Path) else item)
