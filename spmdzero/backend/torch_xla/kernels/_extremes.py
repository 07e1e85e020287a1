"""`amax` and `amin` without a dim, for which torch_xla returns their input."""

import functools
from typing import Any

import torch

from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


@functools.cache
def mend_extremes() -> None:
    """Makes them reduce over all dims."""
    for name in ("amax", "amin"):
        wrap_kernel(name, functools.partial(_over_all_dims, name))


def _over_all_dims(name: str, kernel: Kernel) -> Kernel:
    def extreme(keys: Any, tensor: torch.Tensor, dim: Any = (), keepdim: bool = False) -> Any:
        if not dim:
            if not tensor.numel():
                raise RuntimeError(f"{name}() of no elements. Name a dim that has some")
            dim = list(range(tensor.dim()))
        return kernel(keys, tensor, dim, keepdim)

    return extreme
