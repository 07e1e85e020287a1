"""The host's part of a step by `train_batch` and by the three calls, which take turns.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 SPMDZERO_BACKEND=jax python tests/benchmarks/three_calls.py

It is the processor time of the thread that launches, in milliseconds. Two engines train the same
model in one process, so whatever else the machine does slows both. The ratios are those of
docs/two_backends.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness.workload import Workload
from peers.config import deepspeed_config

import spmdzero
from spmdzero.backend import current, runtime

# More than the steps that are compared before a program is trusted.
WARM_UP = 8


def ways(workload: Workload, recompute: str) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yields each way of training a step, with its name."""
    spmd = {"backend": current().name, "recompute": recompute}
    config = deepspeed_config(workload, stage=2) | {"spmd": spmd}
    one, *_ = spmdzero.initialize(model=workload.build(), config=config)
    other, *_ = spmdzero.initialize(model=workload.build(), config=config)

    def three(batch: Any) -> None:
        loss = other(*batch)
        other.backward(loss)
        other.step()

    yield "train_batch", lambda batch: one.train_batch(iter([batch]))
    yield "three calls", three


def measured(model: str, steps: int, recompute: str) -> dict[str, list[float]]:
    """The host's milliseconds of each step, by way."""
    workload = Workload(model=model, devices=runtime.device_count(), steps=steps)
    found: dict[str, list[float]] = {}
    by_name = dict(ways(workload, recompute))
    for step in range(WARM_UP + steps):
        batch = workload.batch(step % 4)
        for name, run in by_name.items():
            begun = time.thread_time()
            run(batch)
            if step >= WARM_UP:
                found.setdefault(name, []).append(1e3 * (time.thread_time() - begun))
            runtime.wait()
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt-10m", "cnn", "gpt-85m"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recompute", default="nothing", help='such as "everything"')
    told = parser.parse_args()
    devices = runtime.device_count()
    print(f"{current().name}, {devices} devices, recompute {told.recompute}, medians and least")
    print("| model | train_batch, ms | three calls, ms | ratio | of the least |")
    print("|---|---:|---:|---:|---:|")
    for model in told.models:
        whole, three = measured(model, told.steps, told.recompute).values()
        middle = statistics.median(whole), statistics.median(three)
        least = min(whole), min(three)
        print(
            f"| {model} | {middle[0]:.1f} ({least[0]:.1f}) | {middle[1]:.1f} ({least[1]:.1f}) "
            f"| {middle[1] / middle[0]:.2f} | {least[1] / least[0]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
