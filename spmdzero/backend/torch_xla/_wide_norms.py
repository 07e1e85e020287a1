"""Normalisation layers of half-precision tensors, computed in fp32."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_NORMS = {
    F.layer_norm,
    torch.layer_norm,
    F.group_norm,
    torch.group_norm,
    F.batch_norm,
}
_HALF = (torch.float16, torch.bfloat16)


class WideNorms(TorchFunctionMode):
    """Computes norms of fp16 and bf16 tensors in fp32, and returns them in their dtype.

    torch's own kernels do so inside; torch_xla 2.9 lowers a norm to sums in the tensor's dtype,
    whose backward overflows in fp16 at a quarter of the loss scale that torch's bears, and refuses
    a half-precision batch with fp32 running statistics.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`, on fp32 copies where it is a norm of a half-precision tensor."""
        kwargs = kwargs or {}
        if func not in _NORMS or not args or args[0].dtype not in _HALF:
            return func(*args, **kwargs)
        wide = [_wide(arg) for arg in args], {key: _wide(arg) for key, arg in kwargs.items()}
        normed = func(*wide[0], **wide[1]).to(args[0].dtype)
        if func is F.batch_norm:
            for statistics, updated in zip(args[1:3], wide[0][1:3], strict=True):
                if updated is not statistics:
                    statistics.copy_(updated)
        return normed


def _wide(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in _HALF
    return value.float() if half else value
