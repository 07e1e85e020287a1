"""`log_summary`: what the steps send, from the engines whose config turned `comms_logger` on."""

import logging

from spmdzero.errors import SpmdZeroUsageError

logger = logging.getLogger("spmdzero")

Counts = dict[str, dict[int, int]]
# They are the process's, as DeepSpeed's are (utils/comms_logging.py, `CommsLogger.comms_dict`):
# whether an engine is counted must not depend on when Python collects it.
_logged: dict[object, tuple[str, Counts]] = {}


def summarise(source: object, text: str, counts: Counts) -> None:
    """Sets what `log_summary` says of a source of messages: its table, and its counts.

    Args:
        source: any hashable object; it is kept, and so must not be the engine itself.
        text: the table.
        counts: operation -> bytes of the message -> count per step.
    """
    _logged[source] = text, counts


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Counts | None:
    """Logs how often a step sends messages of each operation and size; DeepSpeed's signature.

    The compiler makes the collectives inside of one program, so there are counts and no times. Each
    engine of this process counts that has trained a step, also when it is gone.

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
