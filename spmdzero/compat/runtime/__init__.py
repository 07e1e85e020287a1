"""`deepspeed.runtime`: the modules that scripts import names from."""

from typing import Any

from spmdzero.compat import refusals


def __getattr__(name: str) -> Any:
    return refusals.attribute("runtime", name)
