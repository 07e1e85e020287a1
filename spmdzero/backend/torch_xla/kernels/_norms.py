"""Normalisation layers, computed as torch computes them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_NORMS = {F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.batch_norm}
_HALF = (torch.float16, torch.bfloat16)


class TorchsNorms(TorchFunctionMode):
    """Computes norms of fp16 and bf16 tensors in fp32, and frozen BatchNorms elementwise.

    torch's own kernels widen inside. torch_xla 2.9 lowers a norm to sums in the tensor's dtype,
    whose backward overflows in fp16 at a quarter of the loss scale that torch's bears, and refuses
    a half-precision batch with fp32 running statistics. It also has no backward of a BatchNorm in
    evaluation mode: its backward asks for statistics, which its forward doesn't return then.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`; the result of a norm has the dtype of its input."""
        kwargs = kwargs or {}
        if func not in _NORMS:
            return func(*args, **kwargs)
        casts = func is not F.batch_norm and torch.is_autocast_enabled("xla")
        if casts or not args or args[0].dtype not in _HALF:
            # autocast widens operations on its list, and leaves the result wide.
            return _norm(func, args, kwargs)
        wide = [_wide(arg) for arg in args]
        normed = _norm(func, wide, {key: _wide(arg) for key, arg in kwargs.items()})
        if func is F.batch_norm:
            for statistics, updated in zip(args[1:3], wide[1:3], strict=True):
                if updated is not statistics:
                    statistics.copy_(updated)
        return normed.to(args[0].dtype)


def _norm(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    frozen = None
    if func is F.batch_norm and torch.is_grad_enabled():
        frozen = _frozen(*args, **kwargs)
    return func(*args, **kwargs) if frozen is None else frozen


def _wide(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in _HALF
    return value.float() if half else value


def _frozen(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor | None:
    """The normalised batch by the formula (arXiv 1502.03167); None with its own statistics."""
    if training or running_mean is None or running_var is None:
        return None
    channels = (1, -1, *(1,) * (input.dim() - 2))
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    normed = (input - running_mean.view(channels)) * scale.view(channels)
    return normed if bias is None else normed + bias.view(channels)
