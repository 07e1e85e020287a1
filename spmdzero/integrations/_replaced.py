"""Replaces functions of clients."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OURS = "_spmdzero"


def in_place_of(owner: Any, name: str) -> Callable[[_Function], _Function]:
    """Replaces `owner.name` by the decorated function, which gets the original as first argument.

    Each name is replaced once. If a release has no such name, nothing changes.
    """

    def decorate(function: _Function) -> _Function:
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, _OURS):

            @functools.wraps(original)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            setattr(replaced, _OURS, True)
            setattr(owner, name, replaced)
        return function

    return decorate
