"""Keepers of a block's values between forward and backward, of which the innermost decides."""

import contextlib
from collections.abc import Iterator
from typing import Protocol, TypeVar

import torch


class Keeper(Protocol):
    """Keeps values of the block that runs inside it."""

    def of_kernel(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that replace the results of a kernel."""


_Kind = TypeVar("_Kind", bound=Keeper)
_entered: list[Keeper] = []


def enter(keeper: Keeper) -> None:
    """Makes `keeper` the innermost, until `leave`."""
    _entered.append(keeper)


def leave() -> None:
    """Ends what `enter` began."""
    _entered.pop()


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Context in which no keeper is entered: what runs here was called before those that are."""
    entered, _entered[:] = [*_entered], []
    try:
        yield
    finally:
        _entered[:] = entered


def is_innermost(keeper: Keeper) -> bool:
    """Whether values of what runs now are `keeper`'s to keep."""
    return bool(_entered) and _entered[-1] is keeper


def innermost_of(kind: type[_Kind]) -> _Kind | None:
    """The innermost keeper of a class, None where none is."""
    return next((keeper for keeper in reversed(_entered) if isinstance(keeper, kind)), None)


def kept_of_kernel(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that replace the results of a kernel, which no dispatch mode sees."""
    return _entered[-1].of_kernel(values) if _entered else values
