"""`deepspeed.ops.adagrad`."""

from typing import Any

from spmdzero.compat import refusals


def __getattr__(name: str) -> Any:
    return refusals.attribute("ops.adagrad", name)
