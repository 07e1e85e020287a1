"""Functions of clients that do something else where spmdzero's engine trains."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OURS = "_spmdzero"


def in_place_of(owner: Any, name: str) -> Callable[[_Function], _Function]:
    """Has the decorated function called in the place of `owner.name`, with that as first argument.

    Once for each of them. Where a release has no such name, nothing changes.
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
