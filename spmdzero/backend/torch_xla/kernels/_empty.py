"""Operations of tensors without elements, by which XLA divides by 0: that ends the process."""

import functools
from typing import Any

import torch

from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


@functools.cache
def mend_rolls_of_nothing() -> None:
    """Has `torch.roll` return a copy of them."""
    wrap_kernel("roll", _rolled)


def _rolled(kernel: Kernel) -> Kernel:
    def roll(keys: Any, tensor: torch.Tensor, *args: Any) -> Any:
        return kernel(keys, tensor, *args) if tensor.numel() else tensor.clone()

    return roll
