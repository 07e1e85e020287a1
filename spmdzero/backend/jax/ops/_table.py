"""The table itself: from the name of an aten overload to the function of jax arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Lowering = Callable[..., Any]
F = TypeVar("F", bound=Lowering)

# Names, not OpOverloads, are the keys: a name that this version of torch lacks is then no error.
_TABLE: dict[str, Lowering] = {}


def lowers(*names: str) -> Callable[[F], F]:
    """Enter the function under these names: "add.Tensor", or "relu" for relu.default."""

    def enter(function: F) -> F:
        for name in names:
            key = f"aten.{name}" if "." in name else f"aten.{name}.default"
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
