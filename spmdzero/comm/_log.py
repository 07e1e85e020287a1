"""`log_summary`: what the steps send, from the engines whose config turned `comms_logger` on."""

import logging
from collections.abc import Callable

from spmdzero.errors import SpmdZeroUsageError

logger = logging.getLogger("spmdzero")

Counts = dict[str, dict[int, int]]
_sources: list[tuple[Callable[[], str], Callable[[], Counts]]] = []


def summarise_with(text: Callable[[], str], counts: Callable[[], Counts]) -> None:
    """Adds a source of messages to `log_summary`: as a table, and counted."""
    _sources.append((text, counts))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Counts | None:
    """Logs how often a step sends messages of each operation and size; DeepSpeed's signature.

    The compiler makes the collectives inside of one program, so there are counts and no times.

    Args:
        show_straggler: refused, it needs times.
        return_dict: return operation -> bytes of the message -> count per step.

    Raises:
        SpmdZeroUsageError: no engine logs its collectives, or `show_straggler`.
    """
    if show_straggler:
        raise SpmdZeroUsageError(
            "log_summary(show_straggler=True): collectives are parts of one compiled program, and "
            "no call of Python's could time them. Leave it out"
        )
    if not _sources:
        raise SpmdZeroUsageError(
            'no collectives were logged: write "comms_logger": {"enabled": true} into the config, '
            "and train one step first"
        )
    total: Counts = {}
    for text, counts in _sources:
        logger.info("%s", text())
        for operation, sizes in counts().items():
            known = total.setdefault(operation, {})
            for size, count in sizes.items():
                known[size] = known.get(size, 0) + count
    return total if return_dict else None
