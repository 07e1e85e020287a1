"""Runs scenarios of Trainer in one process, and prints what they found as JSON.

python -m tests.integrations.trainer_runs plain|spmdzero FOLDER SCENARIO...
"""

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

KINDS = ("scenarios", "refusals", "results", "interrupts", "stage_3", "trl")


def run(name: str, side: Any) -> Any:
    """What a scenario found, or the error that ended it."""
    try:
        return scenario(name)(side)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def scenario(name: str) -> Any:
    """The function of that name; peft and its like are imported for those that need them."""
    modules = (import_module(f"tests.integrations.trainer_{kind}") for kind in KINDS)
    return next(vars(module)[name] for module in modules if name in vars(module))


def main(kind: str, folder: str, *names: str) -> None:
    # accelerate would make torch_xla its backend, on either side.
    os.environ["USE_TORCH_XLA"] = "false"
    if kind == "spmdzero":
        from spmdzero.integrations import install

        install()
    from tests.integrations.trainer_setup import Side

    side = Side(deepspeed=kind == "spmdzero", folder=Path(folder))
    found = {name: run(name, side) for name in names}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
