"""Loads a checkpoint on another number of devices, saves it again, and writes down what it got.

`CPU_NUM_DEVICES=2 python -m tests.checkpoint.reshape FROM TO SETTINGS STATE.pt`
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.runs import start, whole_state
from tests.support.processes import environment

ROOT = Path(__file__).resolve().parents[2]


def on_devices(
    devices: int, source: Path, target: Path, settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The state that a new process with that many devices loads from one folder and saves again."""
    file = target.with_suffix(".pt")
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "tests.checkpoint.reshape"),
            *(str(source), str(target), json.dumps(settings), str(file)),
        ],
        cwd=ROOT,
        env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(file, weights_only=True)


def main() -> None:
    source, target, settings, file = sys.argv[1:]
    engine = start(json.loads(settings))
    engine.load_checkpoint(source)
    torch.save(whole_state(engine), file)
    engine.save_checkpoint(target)


if __name__ == "__main__":
    main()
