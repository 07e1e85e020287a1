"""Replaces functions of torch, and knows all that are replaced.

torch, its clients and users keep tables of its functions: which of them a device context concerns,
which of them TorchScript knows, which of them a tensor's class answers itself. A replaced function
has to be found in a table that was filled before, and in one that is filled later.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

REPLACED: dict[str, str] = {}
"""Names of what is replaced, such as ``"torch.Tensor.to"``, with the reasons."""

_Change = Callable[..., Any]
_WRITTEN_IN_C = (type(torch.tensor), type(torch.Tensor.to))


def in_place_of(owner: Any, name: str, *, because: str) -> Callable[[_Change], _Change]:
    """Replaces torch's `owner.name` by the decorated function, and notes the reason.

    Args:
        owner: a module or a class of torch's.
        because: why nothing less does.

    Returns:
        A decorator of the new function, whose first argument is the original.
    """

    def decorate(change: _Change) -> _Change:
        original = getattr(owner, name)
        replaced: Any
        if isinstance(original, _WRITTEN_IN_C):
            kind = _Method if isinstance(owner, type) else _Function
            replaced = kind(original, change)
            builtin = torch.jit._builtins._find_builtin(original)
            if builtin is not None:
                torch.jit._builtins._register_builtin(replaced, builtin)
        else:

            @functools.wraps(original)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                return change(original, *args, **kwargs)

        setattr(owner, name, replaced)
        REPLACED[f"{_path(owner)}.{name}"] = because
        return change

    return decorate


class _Function:
    """A function of torch's C++ code with a change before it.

    It equals the original, so that tables have it under both. A function mode, or a class of
    tensors that answers torch's functions, is asked first, and gets this one: it is what a reader
    of torch's attribute compares with.
    """

    def __init__(self, original: Any, change: _Change) -> None:
        functools.update_wrapper(self, original)
        self._original, self._change = original, change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A mode is found beside any argument.
        if has_torch_function((None,)):
            return handle_torch_function(self, (), *args, **kwargs)
        return self._change(self._original, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()


class _Method(_Function):
    """A method of torch's C++ code with a change before it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Classes of tensors get changed arguments, as they hand them on to torch's C++ code.
        return self._change(self._answered, *args, **kwargs)

    def _answered(self, *args: Any, **kwargs: Any) -> Any:
        asked = (*args, *kwargs.values())
        if has_torch_function(asked):
            return handle_torch_function(self, asked, *args, **kwargs)
        return self._original(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _path(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return owner.__name__
