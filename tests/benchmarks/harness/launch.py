"""Starts the processes of a candidate and collects what they measured."""

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from harness.candidates import Candidate
from harness.processes import ProcessFailedError, run_together
from harness.protocol import Failure, Order, Run
from harness.ranks import rank_environments
from harness.workload import Workload

BENCHMARKS = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 900
# Of the caller's, these would decide what the peers are to be told.
_LEFT_OUT = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "XLA_USE_SPMD")


def launch(workload: Workload, candidate: Candidate) -> Run | Failure:
    """Trains once: one process with virtual devices, or one process per rank."""
    order = Order(peer=candidate.peer, options=candidate.options, workload=workload)
    inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    # All ranks together have the cores that virtual devices share.
    threads = max(1, (os.cpu_count() or 1) // workload.devices)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as ranks:
        if candidate.ranks:
            told = ranks.enter_context(rank_environments(workload.devices, threads=threads))
        else:
            told = [_devices(workload.devices)]
        answers = _run_all(
            "harness.worker",
            dataclasses.asdict(order),
            [inherited | more for more in told],
            folder=Path(scratch),
        )
    if isinstance(answers, Failure):
        return answers
    runs = [Run(**answer) for answer in answers]
    # The first rank speaks for all, because collectives keep the ranks in step; not for memory.
    return dataclasses.replace(runs[0], peak_rss=sum(run.peak_rss for run in runs))


def launch_alone(module: str, order: dict[str, Any]) -> dict[str, Any] | Failure:
    """Runs `python -m module order answer.json` with ``order["devices"]`` virtual devices."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    with tempfile.TemporaryDirectory() as scratch:
        environment = inherited | _devices(order["devices"])
        answers = _run_all(module, order, [environment], folder=Path(scratch))
    return answers if isinstance(answers, Failure) else answers[0]


def _run_all(
    module: str, order: dict[str, Any], environments: list[dict[str, str]], *, folder: Path
) -> list[dict[str, Any]] | Failure:
    answers = [folder / f"{i}.json" for i in range(len(environments))]
    commands = [["-m", module, json.dumps(order), str(answer)] for answer in answers]
    try:
        # `python -m` imports from its folder first: not from the caller's.
        run_together(commands, environments, cwd=BENCHMARKS, folder=folder, timeout=TIMEOUT_SECONDS)
    except ProcessFailedError as error:
        return Failure(error.ended, error.log)
    return [json.loads(answer.read_text()) for answer in answers]


def _devices(count: int) -> dict[str, str]:
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(count),
        "JAX_PLATFORMS": "cpu",
        # What spmdzero turns off by itself: XNNPACK, with which XLA's matrix products are wrong on
        # some CPUs, and a max that loses a NaN. So JAX computes by the same rules.
        "XLA_FLAGS": (
            f"--xla_force_host_platform_device_count={count} --xla_cpu_use_xnnpack=false "
            "--xla_cpu_enable_fast_min_max=false"
        ),
    }
