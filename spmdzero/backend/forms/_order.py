"""An order between two values, expressed so that a compiler can't simplify it away."""

import torch


def after(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, as a value that can't be computed before `other` is.

    XLA removes its optimisation barriers before it schedules on the CPU, and torch has no operation
    for a barrier.
    """
    # Flattened first, all of it would be copied to another layout on a TPU.
    first = other[(0,) * other.dim()]
    # This is never true, but XLA can't simplify it.
    never = first.isnan() & first.isinf()
    return tensor.masked_fill(never, 0)
