"""Asks a worker process, since the number of virtual devices is fixed for a process's life."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Run = Callable[[list[str], dict[str, str]], int]
"""A function that runs a command in an environment, and returns its status."""


def ask(module: str, request: Mapping[str, Any], *, devices: int, run: Run) -> tuple[int, str]:
    """Runs ``python -m module`` with so many virtual devices.

    Args:
        module: it reads the JSON file of its first argument, and writes the file of the second.
        request: that JSON.
        devices: number of virtual devices.
        run: starts the process, and waits for it.

    Returns:
        The process's status, and what it wrote: "" if the status isn't 0.
    """
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        status = run([sys.executable, "-m", module, str(asked), str(answered)], environment)
        return status, "" if status else answered.read_text()
