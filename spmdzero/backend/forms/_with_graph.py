"""Differentiable gradients of operations that have a backward of their own."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from spmdzero.errors import SpmdZeroUsageError


def gradients_with_graph(
    function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of `function(*tensors)`, as differentiable as `function` is.

    An operation that computes its gradient by a program of its own, which autograd doesn't know,
    returns these where `create_graph=True` is asked for.

    Args:
        function: made of torch's operations.
        tensors: its inputs.
        grad: the gradient of its result.

    Returns the gradient of each input, None where it has none.
    """
    with torch.enable_grad():
        # Inputs may be computed from each other, or be the same: these views are used only here.
        ways = [tensor.view_as(tensor) for tensor in tensors]
        made = function(*ways)
        wanted = [way for way in ways if way.requires_grad]
        found = iter(
            torch.autograd.grad([made], wanted, [grad], create_graph=True, allow_unused=True)
        )
        return [next(found) if way.requires_grad else None for way in ways]


def refuse_graph() -> NoReturn:
    """Raises SpmdZeroUsageError: `.grad` can't be differentiated."""
    raise SpmdZeroUsageError(
        "backward(create_graph=True): the .grad of an engine's parameter is kept as shards and has "
        "no graph. Ask for the gradients that you differentiate by torch.autograd.grad(loss, "
        "tensors, create_graph=True), and call engine.backward of a loss that is computed from them"
    )
