"""Lets DeepSpeed's tests import names that are refused: what is used of them then says so.

A test file imports all that its tests use, and most of them use few of DeepSpeed's own parts.
"""

import builtins
import types
from typing import Any

_import = builtins.__import__


class _Absent(type):
    """A name that is refused: `isinstance` says no, and a call says why."""

    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(f"{cls.__name__} is DeepSpeed's own: {cls.why}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}", cls.why)


def _absent(name: str, why: str) -> _Absent:
    return _Absent(name, (), {"why": why, "__hash__": type.__hash__})


def _import_or_stand_in(
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Any = (),
    level: int = 0,
) -> Any:
    is_a_tests = "/tests/unit/" in ((globals or {}).get("__file__") or "")
    if not (is_a_tests and fromlist and name.startswith("deepspeed")):
        return _import(name, globals, locals, fromlist, level)
    found = types.SimpleNamespace()
    for wanted in fromlist:
        try:
            module = _import(name, globals, locals, (wanted,), level)
            if wanted == "*":
                return module
            setattr(found, wanted, getattr(module, wanted))
        except (ImportError, AttributeError) as error:
            setattr(found, wanted, _absent(f"{name}.{wanted}", str(error)))
    return found


builtins.__import__ = _import_or_stand_in
