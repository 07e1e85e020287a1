"""What carries a tensor over a border, and its gradient back."""

from collections.abc import Callable
from typing import Any

import torch

Way = Callable[[torch.Tensor], torch.Tensor]


class Crossing(torch.autograd.Function):
    """`there(tensor)`, whose gradient goes `back`, differentiable as often as one likes.

    A gradient that is differentiated in its turn (`create_graph=True`) crosses by a crossing of its
    own, which goes `back` and whose gradient goes `there`. That is so whatever number of times the
    global loss's gradients those on one side are, because both ways know that number.
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
        """What carries the gradient, where that is differentiated too."""
        return cls
