"""What ZeRO-1 costs over stage 0 when gradients are summed over micro-batches.

Both engines live in one process and take turns step by step: the difference that is looked for is
1 %.
"""

from collections.abc import Callable

from harness.turns import Way, take_turns
from harness.workload import Workload
from peers.config import deepspeed_config

import spmdzero


def measure(model: str, devices: int, accumulation: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each timed step under stage 0 and stage 1."""
    workload = Workload(model=model, devices=devices, steps=steps)

    def trained(stage: int) -> Way:
        config = deepspeed_config(workload, stage=stage)
        config["gradient_accumulation_steps"] = accumulation
        engine, *_ = spmdzero.initialize(model=workload.build(), config=config)

        def prepare(turn: int) -> Callable[[], object]:
            batches = iter([workload.batch(turn * accumulation + k) for k in range(accumulation)])
            return lambda: engine.train_batch(batches).item()

        return prepare

    ways = {str(stage): trained(stage) for stage in (0, 1)}
    taken = take_turns(ways, turns=steps, warm_up=2)
    return {stage: seconds.whole for stage, seconds in taken.items()}
