"""Operations on tensors without elements, for which XLA divides by 0 and ends the process."""

import functools
from typing import Any

import torch

from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


@functools.cache
def mend_rolls_of_nothing() -> None:
    """Makes `torch.roll` return a copy of such a tensor."""
    wrap_kernel("roll", _rolled)


def _rolled(kernel: Kernel) -> Kernel:
    def roll(keys: Any, tensor: torch.Tensor, *args: Any) -> Any:
        return kernel(keys, tensor, *args) if tensor.numel() else tensor.clone()

    return roll
