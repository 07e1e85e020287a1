"""Processes that are hosts of one job: starts them, and collects what they print as JSON."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, environment, free_port
from tests.support.warm import WarmProcess

# Seconds, after which the system ends a process that a test has left behind.
_LONGEST = 1800


class Host:
    """One process of a job.

    Attributes:
        rank: its place.
        process: a fork of one that has imported spmdzero.
    """

    def __init__(
        self, rank: int, command: Sequence[str], *, devices: int, variables: dict[str, str]
    ) -> None:
        self.rank = rank
        backend = {"SPMDZERO_BACKEND": "jax", "PJRT_DEVICE": "CPU"}
        self.process = WarmProcess(
            *command,
            cwd=ROOT,
            environment=environment(CPU_NUM_DEVICES=str(devices), **backend),
            variables=variables,
            timeout=_LONGEST,
        )

    def said(self) -> tuple[str, str]:
        """What it has printed so far, to stdout and to stderr."""
        return self.process.said()

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        return self.process.wait(timeout)

    def result(self) -> Any:
        """What it printed as JSON in its last line."""
        return json.loads(self.said()[0].splitlines()[-1])

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.process.end()


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
    port = free_port()
    started: list[Host] = []
    try:
        for rank in range(count):
            own = variables | place(rank, count, port)
            started.append(Host(rank, ("-m", module, *arguments), devices=devices, variables=own))
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
