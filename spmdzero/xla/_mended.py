"""Operations of torch_xla 2.9 that answer otherwise than torch, put right wherever they run."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

# It holds the kernels below for as long as the process lives.
_mended = torch.library.Library("aten", "IMPL")


@functools.cache
def mend() -> None:
    """Has `amax` and `amin` without a dim reduce all dims; torch_xla returns their input."""
    with warnings.catch_warnings():
        # torch warns that there was a kernel, which these call.
        warnings.simplefilter("ignore")
        for name in ("amax", "amin"):
            kernel = torch.library.get_kernel(f"aten::{name}", "XLA")
            _mended.impl(name, _over_all_dims(name, kernel.call_boxed), "XLA", with_keyset=True)


def _over_all_dims(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(keys: Any, tensor: torch.Tensor, dim: Any = (), keepdim: bool = False) -> Any:
        if not dim:
            if not tensor.numel():
                raise RuntimeError(f"{name}() of no elements. Name a dim that has some")
            dim = list(range(tensor.dim()))
        return kernel(keys, tensor, dim, keepdim)

    return extreme
