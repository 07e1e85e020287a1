"""`deepspeed.checkpoint`: helpers for files of tensors."""

from typing import Any

from spmdzero.compat import refusals


def __getattr__(name: str) -> Any:
    return refusals.attribute("checkpoint", name)
