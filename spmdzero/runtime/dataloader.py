"""`deepspeed.runtime.dataloader`."""

from typing import Any

from spmdzero import refusals
from spmdzero.accelerator import get_accelerator
from spmdzero.utils import RepeatingLoader

__all__ = ["RepeatingLoader", "get_accelerator"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("runtime.dataloader", name)
