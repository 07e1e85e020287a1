"""Which of two values is made first, in words that a compiler can't simplify."""

import torch


def after(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, as a value that can't be known before `other` is.

    XLA takes its optimisation barriers out before it schedules on the CPU, and torch has no word
    for one.
    """
    first = other.reshape(-1)[0]
    # This is never true, and nothing that XLA simplifies.
    never = first.isnan() & first.isinf()
    return tensor.masked_fill(never, 0)
