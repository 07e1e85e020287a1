"""The table itself: from the name of an aten overload to the function of jax arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Lowering = Callable[..., Any]
F = TypeVar("F", bound=Lowering)

# Names, not OpOverloads, are the keys: a name that this version of torch lacks is then no error.
_TABLE: dict[str, Lowering] = {}


class UnsupportedError(Exception):
    """An operation can't be computed as it is called.

    Attributes:
        fix: what works instead, a sentence without a full stop; empty where nothing is known.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        self.fix = fix
        super().__init__(reason)


def lowers(*names: str) -> Callable[[F], F]:
    """Enter the function under these names: "add.Tensor", or "relu" for relu.default."""

    def enter(function: F) -> F:
        for name in names:
            # The decompositions of torch end in a few ops of prims.
            full = name if name.startswith("prims.") else f"aten.{name}"
            key = full if full.count(".") == 2 else f"{full}.default"
            if key in _TABLE:
                raise ValueError(f"{key} is lowered twice")
            _TABLE[key] = function
        return function

    return enter


def lowering(func: Any) -> Lowering | None:
    """What computes `func`, an OpOverload, of jax arrays; None where the table lacks it."""
    return _TABLE.get(str(func))


def table() -> dict[str, Lowering]:
    """Every entry by its name, such as "aten.add.Tensor"."""
    return dict(sorted(_TABLE.items()))
