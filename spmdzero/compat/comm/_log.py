"""`log_summary`: the messages of a step, of engines whose config turns `comms_logger` on."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from spmdzero.errors import SpmdZeroUsageError

logger = logging.getLogger("spmdzero")

Counts = dict[str, dict[int, int]]
# The counts belong to the process, as DeepSpeed's do (utils/comms_logging.py,
# `CommsLogger.comms_dict`): whether an engine counts must not depend on Python's collector.
_logged: dict[object, tuple[str, Counts]] = {}


def summarise(source: object, text: str, counts: Counts) -> None:
    """Sets the table and the counts that `log_summary` reports for a source of messages.

    Args:
        source: any hashable object that isn't the engine, as it is kept.
        text: the table.
        counts: operation -> bytes of the message -> count per step.
    """
    _logged[source] = text, counts


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Counts | None:
    """Logs the number of a step's messages by operation and size; DeepSpeed's signature.

    The compiler makes the collectives inside of one program, so there are counts and no times. All
    engines of this process that have trained a step count, even after they are gone.

    Args:
        show_straggler: refused, as it needs times.
        return_dict: whether to return operation -> bytes of the message -> count per step.

    Raises:
        SpmdZeroUsageError: no engine logs its collectives, or `show_straggler`.
    """
    if show_straggler:
        raise SpmdZeroUsageError(
            "log_summary(show_straggler=True): collectives are parts of one compiled program, and "
            "no call of Python's could time them. Leave it out"
        )
    if not _logged:
        raise SpmdZeroUsageError(
            'no collectives were logged: write "comms_logger": {"enabled": true} into the config, '
            "and train one step first"
        )
    total: Counts = {}
    for text, counts in _logged.values():
        logger.info("%s", text)
        for operation, sizes in counts.items():
            known = total.setdefault(operation, {})
            for size, count in sizes.items():
                known[size] = known.get(size, 0) + count
    return total if return_dict else None


_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def labelled(*, log_name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function accept DeepSpeed's labels, which have no effect on it.

    Args:
        log_name: the default of the label `log_name`, None for the function's name.
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
