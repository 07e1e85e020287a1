"""Calls of modules of a class, taken over for a while."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def calls_replaced(kind: type[nn.Module], watched: Callable[..., Any]) -> Iterator[None]:
    """Inside, a call of a module of class `kind` is `watched(call, module, *args, **kwargs)`.

    `call` is what it would be otherwise. It is taken over for the class, as Python looks
    ``__call__`` up there.
    """
    own, call = "__call__" in vars(kind), kind.__call__

    @functools.wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return watched(call, module, *args, **kwargs)

    kind.__call__ = called
    try:
        yield
    finally:
        if own:
            kind.__call__ = call
        else:
            del kind.__call__
