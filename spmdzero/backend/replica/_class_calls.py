"""Replaces the calls of a class's modules for a while."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def calls_replaced(kind: type[nn.Module], watched: Callable[..., Any]) -> Iterator[None]:
    """Context in which `watched(call, module, *args, **kwargs)` replaces calls of the class.

    `call` is the original. The class is changed, because Python looks up ``__call__`` there.
    """
    own, call = "__call__" in vars(kind), kind.__call__

    @functools.wraps(call)
    def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return watched(call, module, *args, **kwargs)

    kind.__call__ = called
    try:
        yield
    finally:
        if own:
            kind.__call__ = call
        else:
            del kind.__call__
