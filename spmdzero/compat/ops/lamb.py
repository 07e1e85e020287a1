"""`deepspeed.ops.lamb`."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.optim import FusedLamb

__all__ = ["FusedLamb"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("ops.lamb", name)
