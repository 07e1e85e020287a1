"""DeepSpeed's names that spmdzero refuses: what is raised where one is used."""

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
    # `safe_get_local_grad` and its like assert that the parameter is one of ZeRO-3.
    kind = UsageAssertionError if path.startswith("utils.safe_") else SpmdZeroUsageError
    raise kind(f"deepspeed.{path}: {why_refused(path)}")


def why_refused(path: str) -> str:
    """The reason for refusing a name of the table, and what to do in its place."""
    return f"{REFUSALS[path].reason}. {REFUSALS[path].instead}"


def raise_if_refused(owner: str, name: str) -> None:
    """Raises for an attribute that DeepSpeed's engine or optimizer has and ours refuses.

    `hasattr` says no, so a script that asks first goes its other way.

    Args:
        owner: ``"engine"`` or ``"optimizer"``.
        name: of the attribute.

    Raises:
        RefusedNameError: it is in the table; says why, and what to use instead.
    """
    refusal = ATTRIBUTES.get(f"{owner}.{name}")
    if refusal is not None:
        raise RefusedNameError(f"{owner}.{name}: {refusal.reason}. {refusal.instead}")


class _Refused(type):
    """The class of what a refused name is: it has none of the names that DeepSpeed's has."""

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RefusedNameError(
            f"deepspeed.{cls.__qualname__}.{name}: {why_refused(cls.__qualname__)}"
        )


def attribute(package: str, name: str) -> Any:
    """What `spmdzero.<package>.<name>` is where the package itself doesn't say.

    A module of the package, which nobody has imported before: DeepSpeed imports its own, and
    scripts write `deepspeed.runtime.lr_schedules.WarmupLR`. Or for a name that is refused a class
    that raises when it is called; a class, so that `isinstance` and `issubclass` go on working.

    Raises:
        AttributeError: neither.
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
        # Its parent is a module, and no package.
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
