"""Ranges of integers, for which torch_xla ends the process if the step is cut to 0."""

import functools
from typing import Any

import torch

from spmdzero.backend.forms._ranges import require_step
from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


@functools.cache
def refuse_ranges_without_step() -> None:
    """Makes `torch.arange` refuse such ranges."""
    wrap_kernel("arange.start_out", _checking)


def _checking(kernel: Kernel) -> Kernel:
    def arange(keys: Any, start: Any, end: Any, step: Any = 1, **out: torch.Tensor) -> Any:
        require_step(start, end, step, out["out"].dtype)
        return kernel(keys, start, end, step, **out)

    return arange
