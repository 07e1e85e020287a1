"""`deepspeed.utils.logging`: logs on chosen processes only."""

import logging

from spmdzero._logging import is_new
from spmdzero.compat import comm
from spmdzero.errors import SpmdZeroUsageError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_ours = logging.getLogger("spmdzero")
# The Trainer sets DeepSpeed's logger to its own level, which is warnings unless a script says
# another. spmdzero's lines stay: what is compiled, the batch sizes, keys without effect.
logger = _ours.getChild("deepspeed")


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the processes in `ranks`, [-1] for all processes; on none if `ranks` is empty.

    Before processes are connected, each logs (DeepSpeed, utils/logging.py, `get_dist_msg`).
    """
    connected = comm.is_initialized()
    rank = comm.get_rank() if connected else -1
    if not connected or (ranks and (ranks[0] == -1 or rank in ranks)):
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Logs as `log_dist` does, but each message once."""
    if is_new((message, None if ranks is None else tuple(ranks), level)):
        log_dist(message, ranks, level)


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """Prints on the processes on which `log_dist` would log, at any level."""
    connected = comm.is_initialized()
    rank = comm.get_rank() if connected else -1
    if not connected or (ranks and (ranks[0] == -1 or rank in ranks)):
        print(f"[Rank {rank}] {message}")


def warning_once(message: str) -> None:
    """Logs a warning, each message once."""
    if is_new((message, logging.WARNING)):
        logger.warning(message)


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a log level, `logging.INFO` for ``"info"``.

    Raises:
        SpmdZeroUsageError: there is no such level.
    """
    level = LEVELS.get(log_level_str.lower())
    if level is None:
        raise SpmdZeroUsageError(f"{log_level_str!r} is no log level: use {', '.join(LEVELS)}")
    return level


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Sets the level of a logger (spmdzero's own by default) and of its handlers.

    Raises:
        SpmdZeroUsageError: there is no such level.
    """
    chosen = custom_logger or _ours
    level = get_log_level_from_string(log_level_str)
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)
