"""Starts the processes that measure, and collects their answers."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.candidates import Candidate
from harness.processes import ProcessFailedError, run_together
from harness.protocol import Run
from harness.ranks import rank_environments
from harness.workload import Workload

BENCHMARKS = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 900
# As torch computes there, and spmdzero.
_GPU = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
# Of the caller's, these would decide what the peers are to be told. Without bytecode of its own
# spmdzero would be compiled at each start, where torch and jax are not.
_LEFT_OUT = (
    "PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS", "XLA_USE_SPMD", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip


def launch(
    workload: Workload, candidate: Candidate, *, gpu: bool = False
) -> Run | ProcessFailedError:
    """Trains once: one process with virtual devices, or one process per rank; or on GPUs."""
    order = {
        "peer": candidate.peer,
        "options": candidate.options,
        "workload": dataclasses.asdict(workload),
    }
    # All ranks together have the cores that virtual devices share.
    threads = max(1, (os.cpu_count() or 1) // workload.devices)
    try:
        if candidate.ranks:
            with rank_environments(workload.devices, threads=threads) as told:
                on = {"DS_ACCELERATOR": "cuda"} if gpu else {}
                answers = _run("harness.worker", order, [each | on for each in told])
        else:
            on = _GPU if gpu else _devices(workload.devices)
            told = on | {"SPMDZERO_BACKEND": candidate.backend}
            answers = _run("harness.worker", order, [told])
    except ProcessFailedError as error:
        return error
    runs = [Run(**answer) for answer in answers]
    # The first rank speaks for all, because collectives keep the ranks in step; not for memory.
    return dataclasses.replace(runs[0], peak_rss=sum(run.peak_rss for run in runs))


def launch_alone(
    module: str,
    *,
    devices: int,
    backend: str = "torch_xla",
    timeout: float = TIMEOUT_SECONDS,
    **order: Any,
) -> dict[str, Any]:
    """What the module's `measure` answers in a process with so many virtual devices.

    Raises:
        ProcessFailedError: it failed, or ran too long.
    """
    told = _devices(devices) | {"SPMDZERO_BACKEND": backend}
    return _run(module, {"devices": devices, **order}, [told], timeout=timeout)[0]


def _run(
    module: str,
    order: dict[str, Any],
    environments: Sequence[dict[str, str]],
    *,
    timeout: float = TIMEOUT_SECONDS,
) -> list[dict[str, Any]]:
    inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        answers = [folder / f"{i}.json" for i in range(len(environments))]
        # `python -m` imports from its folder first: not from the caller's.
        run_together(
            [["-m", "harness.child", module, json.dumps(order), str(path)] for path in answers],
            [inherited | more for more in environments],
            cwd=BENCHMARKS,
            folder=folder,
            timeout=timeout,
        )
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
