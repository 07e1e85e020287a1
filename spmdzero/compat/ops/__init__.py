"""`deepspeed.ops`: optimizers by name, to be handed to `initialize`."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.compat.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("ops", name)
