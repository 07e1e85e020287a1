"""DeepSpeed's labels for its communication log, `prof`, `log_name` and `debug`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def labelled(*, log_name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a function take the labels too, which change nothing: the log has no host transfers.

    Args:
        log_name: the default of that label, None for the function's name.
    """

    def with_labels(function: Callable[..., Any]) -> Callable[..., Any]:
        labels = {"prof": False, "log_name": log_name or function.__name__, "debug": None}
        more = [inspect.Parameter(n, _KIND, default=value) for n, value in labels.items()]
        own = inspect.signature(function)
        signature = own.replace(parameters=[*own.parameters.values(), *more])

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            return function(**{name: v for name, v in given.items() if name not in labels})

        called.__signature__ = signature  # pyrefly: ignore[missing-attribute]
        return called

    return with_labels
