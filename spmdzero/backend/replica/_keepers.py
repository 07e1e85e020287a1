"""Keepers of a block's values between forward and backward, of which the innermost decides."""

from typing import Protocol

import torch


class Keeper(Protocol):
    """Keeps values of the block that runs inside it."""

    def of_kernel(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that replace the results of a kernel."""


_entered: list[Keeper] = []


def enter(keeper: Keeper) -> None:
    """Makes `keeper` the innermost, until `leave`."""
    _entered.append(keeper)


def leave() -> None:
    """Ends what `enter` began."""
    _entered.pop()


def is_innermost(keeper: Keeper) -> bool:
    """Whether values of what runs now are `keeper`'s to keep."""
    return bool(_entered) and _entered[-1] is keeper


def kept_of_kernel(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that replace the results of a kernel, which no dispatch mode sees."""
    return _entered[-1].of_kernel(values) if _entered else values
