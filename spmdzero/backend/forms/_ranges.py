"""Ranges of integers with a fractional step."""

from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.errors import SpmdZeroRuntimeError


def require_step(start: Any, end: Any, step: Any, dtype: torch.dtype | None) -> None:
    """Refuses a `torch.arange` whose step is cut to 0: torch and torch_xla would divide by it.

    torch ends the process there if `dtype` has 64 bits, torch_xla with any integers.

    Raises:
        SpmdZeroRuntimeError: the step is cut to 0; the error names it.
    """
    if dtype is None or dtype.is_floating_point or dtype.is_complex or not step or int(step):
        return
    raise SpmdZeroRuntimeError(
        f"{user_line()}: torch.arange with {dtype} would cut its step of {step} to 0. Make it of "
        f"floats and convert them: torch.arange({start}, {end}, {step}).to({dtype})"
    )
