"""`deepspeed.runtime.dataloader`."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.compat.accelerator import get_accelerator
from spmdzero.compat.utils import RepeatingLoader

__all__ = ["RepeatingLoader", "get_accelerator"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("runtime.dataloader", name)
