"""Gradient checkpointing that XLA can't undo."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spmdzero.backend._order import after
from spmdzero.backend._tree import map_tensors


class _Tie(torch.autograd.Function):
    """`tensor` itself, as a value that can't be known before `gradient` is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return after(tensor, gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function`, keeps its inputs only, and runs it again in the backward pass.

    torch.utils.checkpoint alone saves nothing under XLA: the second run is the same operations on
    the same values, so the compiler merges it with the first (common subexpression elimination)
    and keeps the activations; its optimisation barriers are gone before that pass on the CPU.
    Here the second run's inputs depend on the gradient that arrives, which the first can't know.

    Args:
        function: anything differentiable; runs twice, with the same random numbers.
        args, kwargs: its inputs; tensors among them are what is kept.

    Returns what `function` returns.
    """
    arrived: list[torch.Tensor] = []
    ran = False

    def run(*inputs: Any, **named: Any) -> Any:
        nonlocal ran
        if ran and arrived:
            gradient = arrived.pop()
            arrived.clear()
            inputs, named = map_tensors(
                (inputs, named), lambda _, tensor: _Tie.apply(tensor, gradient)
            )
        ran = True
        return function(*inputs, **named)

    def watch(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and tensor.device.type == "xla":
            tensor.register_hook(arrived.append)
        return tensor

    return map_tensors(checkpoint(run, *args, use_reentrant=False, **kwargs), watch)
