"""spmdzero's log lines: visible in a script that configures no logging, as DeepSpeed's are."""

import contextlib
import logging
import os
import sys
from collections.abc import Hashable

_SAID: set[Hashable] = set()


class _DefaultHandler(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        # A script that set logging up gets each line once, in its own format.
        if not logging.getLogger().handlers:
            with _beside_progress_bars(self.stream):
                super().emit(record)


def _beside_progress_bars(stream: object) -> contextlib.AbstractContextManager[object]:
    """Around a line: tqdm's bars, if there are any, are taken away for it and drawn again."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None or not getattr(tqdm, "_instances", None):
        return contextlib.nullcontext()
    return tqdm.external_write_mode(file=stream)


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


_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# Its lines are the user's: `log_dist` names the processes that say them.
_USERS = os.path.join(_PACKAGE, "compat", "logging.py")


def _is_the_scripts(record: logging.LogRecord) -> bool:
    own = record.pathname.startswith(_PACKAGE) and record.pathname != _USERS
    return record.levelno >= logging.WARNING or not own


def leave_lines_to_the_first_host() -> None:
    """Of spmdzero's own lines only warnings and errors come from this process from now on.

    What the script says by the same logger comes as ever.
    """
    logging.getLogger("spmdzero").addFilter(_is_the_scripts)


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
