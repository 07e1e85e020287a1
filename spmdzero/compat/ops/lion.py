"""`deepspeed.ops.lion`."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.optim import FusedLion

__all__ = ["FusedLion"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("ops.lion", name)
