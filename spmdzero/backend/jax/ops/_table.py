"""The table of operations: names of aten overloads and their functions of jax arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Lowering = Callable[..., Any]
F = TypeVar("F", bound=Lowering)

# The keys are names, not OpOverloads: a name that this version of torch lacks is no error.
_TABLE: dict[str, Lowering] = {}


class UnsupportedError(Exception):
    """An operation can't be computed with these arguments.

    Attributes:
        fix: what works instead, a sentence without a full stop; empty if nothing is known.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        self.fix = fix
        super().__init__(reason)


def lowers(*names: str) -> Callable[[F], F]:
    """Decorator that enters a function under names: "add.Tensor", or "relu" for relu.default."""

    def enter(function: F) -> F:
        for name in names:
            # torch's decompositions end in a few ops of prims.
            full = name if name.startswith(("prims.", "spmdzero.")) else f"aten.{name}"
            key = full if full.count(".") == 2 else f"{full}.default"
            if key in _TABLE:
                raise ValueError(f"{key} is lowered twice")
            _TABLE[key] = function
        return function

    return enter


def lowering(func: Any) -> Lowering | None:
    """The function of jax arrays that computes `func`, an OpOverload; None without an entry."""
    return _TABLE.get(str(func))


def table() -> dict[str, Lowering]:
    """All entries by name, such as "aten.add.Tensor"."""
    return dict(sorted(_TABLE.items()))
