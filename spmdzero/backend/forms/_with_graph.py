"""A backward that is differentiated in its turn, of what has a backward of its own."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from spmdzero.errors import SpmdZeroUsageError


def gradients_with_graph(
    function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of `function(*tensors)`, as differentiable as `function` is.

    What computes its gradient by a program of its own, whose operations autograd doesn't know,
    returns these where `create_graph=True` is asked for.

    Args:
        function: in torch's operations.
        tensors: its inputs.
        grad: of what it returns.

    Returns for each input its gradient, None where it has none.
    """
    with torch.enable_grad():
        # One may be computed from another, or be the same: each of these has uses here only.
        ways = [tensor.view_as(tensor) for tensor in tensors]
        made = function(*ways)
        wanted = [way for way in ways if way.requires_grad]
        found = iter(
            torch.autograd.grad([made], wanted, [grad], create_graph=True, allow_unused=True)
        )
        return [next(found) if way.requires_grad else None for way in ways]


def refuse_graph() -> NoReturn:
    """Raises SpmdZeroUsageError for a `.grad` that is to be differentiated."""
    raise SpmdZeroUsageError(
        "backward(create_graph=True): the .grad of an engine's parameter is kept as shards and has "
        "no graph. Ask for the gradients that you differentiate by torch.autograd.grad(loss, "
        "tensors, create_graph=True), and call engine.backward of a loss that is computed from them"
    )
