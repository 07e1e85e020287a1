"""A model's own arithmetic: what is counted while a forward is traced only to count it."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The matrix products of forwards, and those that their backwards can't do without.

    Attributes:
        flops: operations of one device.
        unknown: why parts are not counted, in words; empty if everything is.
    """

    flops: float = 0.0
    unknown: tuple[str, ...] = ()

    def __add__(self, other: "Work") -> "Work":
        unknown = dict.fromkeys((*self.unknown, *other.unknown))
        return Work(flops=self.flops + other.flops, unknown=tuple(unknown))

    def times(self, factor: float) -> "Work":
        """The work of so many alike."""
        return dataclasses.replace(self, flops=self.flops * factor)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """A matrix product of a forward.

    Attributes:
        flops: operations of the forward.
        operands: of each of the two operands the tensors that it is computed from.
    """

    flops: float
    operands: tuple[tuple[torch.Tensor, ...], ...]


class Counter(Protocol):
    """Counts the products of a forward."""

    def counted_as(self, *products: Product) -> contextlib.AbstractContextManager[None]:
        """Context in which operations count as `products`, whatever they are."""


_counter: contextvars.ContextVar[Counter | None] = contextvars.ContextVar("_counter", default=None)


@contextlib.contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Context in which a forward runs only for `counter`: nothing is kept of it."""
    before = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(before)


def is_counting() -> bool:
    """Whether the forward that is traced is only counted."""
    return _counter.get() is not None


def counted_as(*products: Product) -> contextlib.AbstractContextManager[None]:
    """Context for operations that are other ones than the products which the model asks for.

    So a kernel, or a loss that computes gradients in its forward, counts as what it stands for.
    """
    counter = _counter.get()
    return contextlib.nullcontext() if counter is None else counter.counted_as(*products)
