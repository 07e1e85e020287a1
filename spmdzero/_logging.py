"""spmdzero's log lines: visible in a script that configures no logging, as DeepSpeed's are."""

import functools
import logging


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


@functools.cache
def log_once(message: str) -> None:
    """Logs an INFO line of the "spmdzero" logger, each message once in a process."""
    logging.getLogger("spmdzero").info("%s", message)
