"""DeepSpeed's names that spmdzero refuses, and the errors that their use raises."""

import importlib
import importlib.util
from typing import Any, NoReturn

from spmdzero.compat.refusals._attributes import ATTRIBUTES
from spmdzero.compat.refusals._table import REFUSALS, Refusal
from spmdzero.errors import RefusedNameError, SpmdZeroUsageError, UsageAssertionError

__all__ = [
    "ATTRIBUTES",
    "REFUSALS",
    "Refusal",
    "attribute",
    "raise_if_refused",
    "refuse",
    "refused_methods",
    "why_refused",
]


def refuse(path: str) -> NoReturn:
    """Raises SpmdZeroUsageError for a name of the table."""
    # DeepSpeed's `safe_get_local_grad` and its siblings assert that the parameter is ZeRO-3's.
    kind = UsageAssertionError if path.startswith("utils.safe_") else SpmdZeroUsageError
    raise kind(f"deepspeed.{path}: {why_refused(path)}")


def why_refused(path: str) -> str:
    """The reason for refusing a name of the table, and what to do instead."""
    return f"{REFUSALS[path].reason}. {REFUSALS[path].instead}"


def raise_if_refused(owner: str, name: str) -> None:
    """Raises for an attribute of DeepSpeed's engine or optimizer that spmdzero refuses.

    `hasattr` gives False, so a script that asks first takes its other path.

    Args:
        owner: ``"engine"`` or ``"optimizer"``.
        name: name of the attribute.

    Raises:
        RefusedNameError: the name is in the table; says why, and what to use instead.
    """
    refusal = ATTRIBUTES.get(f"{owner}.{name}")
    if refusal is not None:
        raise RefusedNameError(f"{owner}.{name}: {refusal.reason}. {refusal.instead}")


class _Refused(type):
    """The metaclass of refused names, which refuses attributes of the name too."""

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RefusedNameError(
            f"deepspeed.{cls.__qualname__}.{name}: {why_refused(cls.__qualname__)}"
        )


def attribute(package: str, name: str) -> Any:
    """The value of `spmdzero.<package>.<name>` if the package itself has no such name.

    It is a module of the package that was not imported before: DeepSpeed imports its own modules,
    and scripts write `deepspeed.runtime.lr_schedules.WarmupLR`. Or, for a refused name, it is a
    class that raises when it is called; a class, so that `isinstance` and `issubclass` work.

    Raises:
        AttributeError: there is no such module, and the name is not refused.
    """
    path = f"{package}.{name}".lstrip(".")
    if path in REFUSALS:

        def new(*_: Any, **__: Any) -> NoReturn:
            refuse(path)

        return _Refused(
            name, (), {"__new__": new, "__doc__": why_refused(path), "__qualname__": path}
        )
    if not name.startswith("_") and _is_module(f"spmdzero.{path}"):
        return importlib.import_module(f"spmdzero.{path}")
    module = f"spmdzero.{package}".rstrip(".")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        # The parent is a module, not a package.
        return False


def refused_methods(path: str) -> type:
    """A base class with a method that raises for each name of the table below `path`."""

    def method(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> NoReturn:
            refuse(f"{path}.{name}")

        refused.__name__ = name
        refused.__doc__ = f"Refused: {REFUSALS[f'{path}.{name}'].reason}."
        return refused

    names = [key.removeprefix(f"{path}.") for key in REFUSALS if key.startswith(f"{path}.")]
    return type(f"Refused{path.rsplit('.', 1)[-1]}", (), {name: method(name) for name in names})
