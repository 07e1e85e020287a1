"""Imports spmdzero, then switches it on; prints what that changed in the process, as JSON.

`python tests/support/first_import.py`, and what spmdzero prints by itself is seen around the JSON.
"""

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

DEEPSPEEDS = {
    *("accelerator", "checkpoint", "checkpointing", "comm", "launcher", "monitor", "ops"),
    *("profiling", "runtime", "utils", "zero"),
}


def state() -> dict[str, Any]:
    """What a library could change for the script that imports it."""
    return {
        "random": hash(random.getstate()),
        "numpy": hash(str(np.random.get_state())),
        "torch": hash(bytes(torch.get_rng_state().numpy())),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "root handlers": [str(handler) for handler in logging.root.handlers],
        "root level": logging.root.level,
        "hooks": [str(sys.excepthook), str(sys.displayhook), str(warnings.showwarning)],
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if before.get(name) != value}


def modules() -> list[str]:
    """The public modules of the packages that DeepSpeed has too."""
    from spmdzero.compat import _old_paths

    root = Path(__file__).parents[2] / "spmdzero"
    paths = [path.relative_to(root).with_suffix("") for path in root.rglob("*.py")]
    names = (".".join(path.parts).removesuffix(".__init__") for path in paths)
    scripts = {*names, *_old_paths._SAME, *_old_paths._MADE}
    return sorted(name for name in scripts if name.split(".")[0] in DEEPSPEEDS and "._" not in name)


def reachable(package: Any, path: str) -> bool:
    try:
        functools.reduce(getattr, path.split("."), package)
    except AttributeError:
        return False
    return True


def main() -> None:
    os.environ.pop("PJRT_DEVICE", None)
    before, variables = state(), dict(os.environ)
    import spmdzero

    imported, with_it = state(), dict(os.environ)
    missing = [path for path in modules() if not reachable(spmdzero, path)]
    print("imported")
    # Counts the devices, which starts XLA before anything is initialized.
    with contextlib.suppress(spmdzero.SpmdZeroUsageError):
        spmdzero.explain(torch.nn.Identity(), {}, (), tpu=["v5e:8x8"])
    spmdzero.init_distributed()
    spmdzero.comm.new_group([0])
    x = torch.ones(2, device=spmdzero.backend.runtime.device()) + 1
    spmdzero.backend.runtime.sync()
    found = {
        "at import": changed(before, imported),
        "variables at import": changed(variables, with_it),
        "at the start": changed(imported, state()),
        "variables at the start": changed(with_it, dict(os.environ)),
        "sum": x.sum().item(),
        "modules": len(modules()),
        "missing modules": missing,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
