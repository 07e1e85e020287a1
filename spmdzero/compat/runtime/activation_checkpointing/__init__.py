"""`deepspeed.runtime.activation_checkpointing`."""

from typing import Any

from spmdzero.compat import checkpointing, refusals

__all__ = ["checkpointing"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("runtime.activation_checkpointing", name)
