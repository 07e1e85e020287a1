"""Keeps TorchTPU out of this process: both would open the TPU's library, which serves one.

The distribution ``torch_tpu`` names itself in the entry points ``torch.backends``, which `import
torch` loads unless a variable of the environment says 0 (torch/__init__.py).
"""

import importlib.util
import os
import sys

_NAME = "torch_tpu"
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The variable: ``"0"`` keeps all backends out that load themselves."""


def is_installed() -> bool:
    """Whether this environment has it; imports nothing."""
    return _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None


def is_loaded() -> bool:
    """Whether this process has it."""
    return _NAME in sys.modules


def keep_out() -> None:
    """Has a later `import torch`, here and in child processes, leave it out, unless told to."""
    if "torch" not in sys.modules and is_installed():
        os.environ.setdefault(SWITCH, "0")


def in_the_way() -> str:
    """A message: it is loaded, and what to do."""
    return (
        f"{_NAME} is loaded, which `import torch` does by itself where it is installed, and it "
        f"drives the TPU that spmdzero is to drive. Set {SWITCH}=0 before Python starts, start the "
        "script by `spmdzero run`, or import spmdzero before torch"
    )
