"""spmdzero's log lines: visible in a script that configures no logging, as DeepSpeed's are."""

import logging
from collections.abc import Hashable

_SAID: set[Hashable] = set()


class _DefaultHandler(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        # A script that set logging up gets each line once, in its own format.
        if not logging.getLogger().handlers:
            super().emit(record)


def show_log_lines() -> None:
    """Prints INFO lines of the "spmdzero" logger to stderr unless the root logger has handlers."""
    logger = logging.getLogger("spmdzero")
    if not logger.handlers:
        handler = _DefaultHandler()
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] [spmdzero] %(message)s")
        )
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def log_once(message: str) -> None:
    """Logs an INFO line of the "spmdzero" logger, each message once in a process."""
    if is_new(message):
        logging.getLogger("spmdzero").info("%s", message)


def is_new(said: Hashable) -> bool:
    """Whether this is the first time in this process that it is asked of `said`."""
    new = said not in _SAID
    _SAID.add(said)
    return new


def forget_what_was_logged() -> None:
    """Makes everything new again, for tests: none may depend on which ran before it."""
    _SAID.clear()
