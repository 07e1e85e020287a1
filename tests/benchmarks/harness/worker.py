"""Trains one candidate in this process: `python -m harness.worker '{...}' result.json`.

A process of its own, because torch_xla fixes the number of devices at the first access.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.workload import GLOBAL_BATCH, Workload

WARM_UP = 3
"""Untimed steps: the first compiles, and a first step on fresh states may need a second program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one process measured.

    Attributes:
        step_seconds: per timed step, until the devices were done.
        host_seconds: per timed step, CPU time of the thread that traces and launches. Wall time up
            to the return of `engine.step()` would not do: torch_xla's CPU client usually returns
            only when the program has run, on threads of its own.
        warm_up_seconds: per warm-up step, until the devices were done.
        losses: the global mean loss of every step, warm-up included.
    """

    step_seconds: list[float]
    host_seconds: list[float]
    warm_up_seconds: list[float]
    losses: list[float]

    @property
    def device_seconds(self) -> list[float]:
        """Per timed step, what the host did not use."""
        return [s - h for s, h in zip(self.step_seconds, self.host_seconds, strict=True)]

    @property
    def compile_seconds(self) -> float:
        """What the warm-up took beyond as many median steps."""
        usual = len(self.warm_up_seconds) * statistics.median(self.step_seconds)
        return max(0.0, sum(self.warm_up_seconds) - usual)


def run_spmdzero(workload: Workload, spmd: dict[str, str]) -> Run:
    """Trains with spmdzero on `CPU_NUM_DEVICES` virtual devices.

    Raises:
        RuntimeError: a timed step compiled.
    """
    import spmdzero
    from spmdzero.xla import runtime

    config = workload.config() | {"spmd": spmd}
    engine, *_ = spmdzero.initialize(model=workload.build(), config=config)
    if runtime.device_count() != workload.devices:
        raise RuntimeError(f"{runtime.device_count()} devices, not {workload.devices}")
    return _train(
        engine,
        workload,
        rows=slice(None),
        wait=runtime.wait,
        read=lambda loss: loss.item(),
        compiled=runtime.compile_count,
    )


def run_deepspeed(workload: Workload) -> Run:
    """Trains this process's rows as one DeepSpeed rank (RANK, WORLD_SIZE, MASTER_PORT are set)."""
    import deepspeed  # pyrefly: ignore[missing-import]

    rank, rows = int(os.environ["RANK"]), GLOBAL_BATCH // workload.devices
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(model=workload.build(), config=workload.config())

    def read(loss: torch.Tensor) -> float:
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)  # also the barrier before the next step
        return mean.item() / workload.devices

    run = _train(
        engine,
        workload,
        rows=slice(rank * rows, (rank + 1) * rows),
        wait=lambda: None,
        read=read,
        compiled=lambda: 0,
    )
    torch.distributed.destroy_process_group()
    return run


def _train(
    engine: Any,
    workload: Workload,
    *,
    rows: slice,
    wait: Callable[[], None],
    read: Callable[[torch.Tensor], float],
    compiled: Callable[[], int],
) -> Run:
    seconds: list[float] = []
    host: list[float] = []
    losses: list[float] = []
    programs = 0
    for step in range(WARM_UP + workload.steps):
        if step == WARM_UP:
            programs = compiled()
        inputs, targets = (tensor[rows] for tensor in workload.batch(step))
        start, start_host = time.perf_counter(), time.thread_time()
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        wait()
        seconds.append(time.perf_counter() - start)
        host.append(time.thread_time() - start_host)
        losses.append(read(loss))
    if compiled() != programs:
        raise RuntimeError(f"{compiled() - programs} programs were compiled in the timed steps")
    return Run(
        step_seconds=seconds[WARM_UP:],
        host_seconds=host[WARM_UP:],
        warm_up_seconds=seconds[:WARM_UP],
        losses=losses,
    )


def main() -> None:
    """Runs the candidate of argv[1] and writes its `Run` to argv[2]."""
    order = json.loads(sys.argv[1])
    workload, spmd = Workload(**order["workload"]), order["spmd"]
    run = run_deepspeed(workload) if spmd is None else run_spmdzero(workload, spmd)
    Path(sys.argv[2]).write_text(json.dumps(dataclasses.asdict(run)))


if __name__ == "__main__":
    main()
