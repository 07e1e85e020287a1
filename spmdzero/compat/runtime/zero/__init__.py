"""`deepspeed.runtime.zero`: `spmdzero.zero` by its long name."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.compat.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("runtime.zero", name)
