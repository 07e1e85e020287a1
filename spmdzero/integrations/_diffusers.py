"""diffusers: keeps torch_xla out of it, and gives its moving averages the name `deepspeed`."""

from importlib import import_module
from typing import Any

from spmdzero._after_import import after_import


def follow_imports() -> None:
    """Tells diffusers what it can't find out here, as it is imported."""
    after_import("diffusers.utils.import_utils", _leave_torch_xla)
    after_import("diffusers.training_utils", _name_deepspeed)


def _leave_torch_xla(utilities: Any) -> None:
    # It reads no variable of the environment, and would import torch_xla where it is installed.
    utilities._torch_xla_available = False


def _name_deepspeed(utilities: Any) -> None:
    # EMAModel gathers parameters at stage 3 by this name. diffusers imports it only if a script
    # has said before `import diffusers` that its stage is 3, which none does.
    if not hasattr(utilities, "deepspeed"):
        utilities.deepspeed = import_module("deepspeed")
