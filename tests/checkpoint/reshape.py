"""Loads a checkpoint on another number of devices, saves it again, and writes down what it got.

`CPU_NUM_DEVICES=2 python -m tests.checkpoint.reshape FROM TO SETTINGS STATE.pt`
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.runs import start, whole_state
from tests.support.processes import run_module


def on_devices(
    devices: int, source: Path, target: Path, settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The state that a new process with that many devices loads from one folder and saves again."""
    file = target.with_suffix(".pt")
    run_module(
        "tests.checkpoint.reshape",
        *(str(source), str(target), json.dumps(settings), str(file)),
        devices=devices,
    )
    return torch.load(file, weights_only=True)


def main() -> None:
    source, target, settings, file = sys.argv[1:]
    engine = start(json.loads(settings))
    engine.load_checkpoint(source)
    torch.save(whole_state(engine), file)
    engine.save_checkpoint(target)


if __name__ == "__main__":
    main()
