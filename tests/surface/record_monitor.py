"""Records real DeepSpeed's CSV monitor into tests/data/monitor_csv.json: file name -> its text.

Needs deepspeed==0.19.8: `DS_ACCELERATOR=cpu python -m tests.surface.record_monitor`. One rank
trains on the rows that 8 devices share in the test, so steps, lr and losses are the same.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.support.contract import ROWS, make_batch, make_model

DATA = Path(__file__).parents[1] / "data" / "monitor_csv.json"
STEPS, ACCUMULATION = 4, 2


def config(folder: Path, *, devices: int) -> dict[str, Any]:
    """The run's JSON, writing below `folder`."""
    return {
        "train_micro_batch_size_per_gpu": ROWS // devices,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 6, "warmup_max_lr": 2e-3, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 2},
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"},
    }


def train(engine: Any) -> list[float]:
    """The mean loss of each step."""
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(ACCUMULATION):
            loss = engine(*make_batch(step, micro))
            engine.backward(loss)
            engine.step()
            total += loss.item() / ACCUMULATION
        losses.append(total)
    return losses


def main() -> None:
    """Trains and records."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29632"
    )
    import deepspeed

    with tempfile.TemporaryDirectory() as folder:
        engine, *_ = deepspeed.initialize(
            model=make_model(), config=config(Path(folder), devices=1)
        )
        losses = train(engine)
        files = {path.name: path.read_bytes().decode() for path in Path(folder, "job").iterdir()}
    DATA.write_text(json.dumps({"losses": losses, "files": files}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
