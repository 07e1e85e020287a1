"""`deepspeed.accelerator`: answers scripts' questions about the devices of this host."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.compat.accelerator._accelerator import XlaAccelerator, get_accelerator

DeepSpeedAccelerator = XlaAccelerator

__all__ = ["DeepSpeedAccelerator", "XlaAccelerator", "get_accelerator"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("accelerator", name)
