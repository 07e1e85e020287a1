"""Real DeepSpeed, asked to train, to save and to go on from a checkpoint."""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.deepspeed import run_ranks

ROOT = Path(__file__).parents[2]


def order(case: str, *, start: int, steps: int, **more: Any) -> dict[str, Any]:
    """What one run is to do; see `deepspeed_rank`."""
    quiet = {"load": None, "save": None, "save_at": None, "universal": False, "stage": None}
    return quiet | {"case": case, "start": start, "steps": steps} | more


def train(orders: list[dict[str, Any]], *, ranks: int) -> list[dict[str, Any]]:
    """Runs the orders one after the other in the same processes of so many ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "orders.json"), Path(scratch, "results.json")
        asked.write_text(json.dumps(orders))
        run_ranks(
            ["-m", "tests.interchange.deepspeed_rank", str(asked), str(answered)],
            ranks=ranks,
            cwd=ROOT,
            timeout=900,
        )
        return json.loads(answered.read_text())
