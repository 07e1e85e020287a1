"""BatchNorm layers that use their running statistics while the rest of the model trains."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class FrozenNorms(TorchFunctionMode):
    """Computes a BatchNorm in evaluation mode elementwise, where autograd records.

    torch_xla 2.9 has no backward of it: its forward returns no statistics then, which its backward
    asks for.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`, or the formula of a BatchNorm in evaluation mode (arXiv 1502.03167)."""
        kwargs = kwargs or {}
        if func is F.batch_norm and torch.is_grad_enabled():
            normed = _frozen(*args, **kwargs)
            if normed is not None:
                return normed
        return func(*args, **kwargs)


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
    """The normalised batch, None where the statistics are the batch's own."""
    if training or running_mean is None or running_var is None:
        return None
    channels = (1, -1, *(1,) * (input.dim() - 2))
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    normed = (input - running_mean.view(channels)) * scale.view(channels)
    return normed if bias is None else normed + bias.view(channels)
