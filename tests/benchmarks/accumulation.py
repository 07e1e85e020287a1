"""What ZeRO-1 costs over stage 0 when gradients are summed over micro-batches.

`python -m accumulation '{"model": ..., "devices": ..., "accumulation": 8, "steps": ...}' out.json`

Both engines live in one process and take turns step by step, so that a slow second hits both: the
difference that is looked for is 1 %.
"""

import json
import sys
import time
from pathlib import Path

from harness.workload import Workload
from peers.config import deepspeed_config

import spmdzero
from spmdzero.backend.torch_xla import runtime

WARM_UP = 2


def measure(model: str, devices: int, accumulation: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each timed step under stage 0 and stage 1."""
    workload = Workload(model=model, devices=devices, steps=steps)
    engines = {}
    for stage in (0, 1):
        config = deepspeed_config(workload, stage=stage)
        config["gradient_accumulation_steps"] = accumulation
        engines[stage], *_ = spmdzero.initialize(model=workload.build(), config=config)
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    for step in range(WARM_UP + steps):
        # Whoever goes first in a turn has the caches of the other's batch.
        for stage in (0, 1) if step % 2 else (1, 0):
            batches = iter([workload.batch(step * accumulation + k) for k in range(accumulation)])
            start = time.perf_counter()
            engines[stage].train_batch(batches).item()
            runtime.wait()
            seconds[str(stage)].append(time.perf_counter() - start)
    return {stage: taken[WARM_UP:] for stage, taken in seconds.items()}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(**json.loads(sys.argv[1]))))
