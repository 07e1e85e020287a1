"""`deepspeed.ops.adam`."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.optim import FusedAdam

__all__ = ["FusedAdam"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("ops.adam", name)
