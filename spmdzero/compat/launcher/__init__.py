"""`deepspeed.launcher`: the name that launchers read the environment file by."""

from typing import Any

from spmdzero.compat import refusals


def __getattr__(name: str) -> Any:
    return refusals.attribute("launcher", name)
