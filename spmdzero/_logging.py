"""Shows spmdzero's log lines in a script that configures no logging, as DeepSpeed does."""

import contextlib
import logging
import os
import sys
from collections.abc import Hashable

_SAID: set[Hashable] = set()


class _DefaultHandler(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        # A script that configures logging gets each line once, in its own format.
        if not _is_shown(record):
            with _beside_progress_bars(self.stream):
                super().emit(record)


def _is_shown(record: logging.LogRecord) -> bool:
    """Whether a handler of the root logger shows a line, and does not only keep it in a file.

    Clients give the root logger handlers that drop all lines but errors, as ms-swift does.
    """
    return logging.getLogger(record.name).propagate and any(
        record.levelno >= handler.level
        and not isinstance(handler, logging.FileHandler | logging.NullHandler)
        for handler in logging.getLogger().handlers
    )


def _beside_progress_bars(stream: object) -> contextlib.AbstractContextManager[object]:
    """Removes tqdm's bars, if there are any, while a line is printed, and draws them again."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None or not getattr(tqdm, "_instances", None):
        return contextlib.nullcontext()
    return tqdm.external_write_mode(file=stream)


def show_log_lines() -> None:
    """Prints INFO lines of the "spmdzero" logger to stderr unless the root logger shows them."""
    logger = logging.getLogger("spmdzero")
    if not logger.handlers:
        handler = _DefaultHandler()
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] [spmdzero] %(message)s")
        )
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# Lines of this file are the user's: `log_dist` chooses the processes that log them.
_USERS = os.path.join(_PACKAGE, "compat", "logging.py")


def _is_the_scripts(record: logging.LogRecord) -> bool:
    own = record.pathname.startswith(_PACKAGE) and record.pathname != _USERS
    return record.levelno >= logging.WARNING or not own


def leave_lines_to_the_first_host() -> None:
    """Limits spmdzero's own lines in this process to warnings and errors from now on.

    Lines that the script logs with the same logger are not limited.
    """
    logging.getLogger("spmdzero").addFilter(_is_the_scripts)


def log_once(message: str) -> None:
    """Logs an INFO line of the "spmdzero" logger, each message once in a process."""
    if is_new(message):
        logging.getLogger("spmdzero").info("%s", message)


def is_new(said: Hashable) -> bool:
    """Whether this process asks about `said` for the first time."""
    new = said not in _SAID
    _SAID.add(said)
    return new


def forget_what_was_logged() -> None:
    """Makes `is_new` true for everything again, so that tests don't depend on earlier tests."""
    _SAID.clear()
