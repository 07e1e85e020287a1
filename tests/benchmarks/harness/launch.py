"""Starts the processes of a candidate and collects what they measured."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.candidates import Candidate
from harness.worker import Run
from harness.workload import Workload

BENCHMARKS = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 900


class CandidateFailedError(Exception):
    """A candidate's process ended with an error, or not at all; holds the end of its output."""


def launch(workload: Workload, candidate: Candidate) -> Run:
    """Trains once: one process with virtual devices, or one DeepSpeed process per rank.

    Raises:
        CandidateFailedError: one of the processes failed or ran past `TIMEOUT_SECONDS`.
    """
    if candidate.spmd is None:
        environments = [os.environ | rank for rank in _ranks(workload.devices, port=_free_port())]
    else:
        devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(workload.devices)}
        environments = [os.environ | devices]
    order = json.dumps({"workload": dataclasses.asdict(workload), "spmd": candidate.spmd})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _run_all(candidate.name, order, environments, folder=folder)
        # The first rank speaks for all: collectives keep the ranks in step.
        return Run(**json.loads((folder / "0.json").read_text()))


def _run_all(name: str, order: str, environments: list[dict[str, str]], *, folder: Path) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i, environment in enumerate(environments):
            with (folder / f"{i}.log").open("wb") as log:
                command = [sys.executable, "-m", "harness.worker", order, str(folder / f"{i}.json")]
                processes.append(
                    subprocess.Popen(
                        command,
                        # `python -m` imports from its folder first: not from the caller's.
                        cwd=BENCHMARKS,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        for i, process in enumerate(processes):
            try:
                code = process.wait(timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                code = f"no exit after {TIMEOUT_SECONDS} s"
            if code != 0:
                tail = (folder / f"{i}.log").read_text(errors="replace")[-3000:]
                raise CandidateFailedError(f"{name}, process {i}: {code}\n{tail}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _ranks(count: int, *, port: int) -> list[dict[str, str]]:
    return [
        {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(count)
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
