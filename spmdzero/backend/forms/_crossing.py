"""Carrying a tensor over a border, and its gradient back."""

from collections.abc import Callable
from typing import Any

import torch

Way = Callable[[torch.Tensor], torch.Tensor]


class Crossing(torch.autograd.Function):
    """`there(tensor)`, whose gradient is `back(grad)`; differentiable any number of times.

    A gradient that is itself differentiated (`create_graph=True`) crosses by a crossing of its own:
    forward by `back`, and its gradient by `there`. This also holds where gradients on one side are
    a multiple of the global loss's gradients, because both functions know the factor.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        """See the class."""
        ctx.there, ctx.back = there, back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """See the class."""
        if not torch.is_grad_enabled():
            return ctx.back(*grads), None, None
        return ctx._forward_cls.opposite().apply(*grads, ctx.back, ctx.there), None, None

    @classmethod
    def opposite(cls) -> "type[Crossing]":
        """The class of the crossing that carries a gradient, if that is differentiated too."""
        return cls
