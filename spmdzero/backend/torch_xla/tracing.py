"""Recording what host and devices do, as a trace that TensorBoard and Perfetto show."""

import os

import torch_xla.debug.profiler as xp

from spmdzero.errors import SpmdZeroUsageError


def start(folder: str | os.PathLike[str]) -> None:
    """Starts a trace that `stop` writes into `folder`.

    Raises:
        SpmdZeroUsageError: a trace is being recorded already.
    """
    try:
        xp.start_trace(folder)
    except RuntimeError as error:
        raise SpmdZeroUsageError(
            "a trace is being recorded already, and torch_xla records one at a time. End it first"
        ) from error


def stop() -> None:
    """Ends the trace and writes it to ``<folder>/plugins/profile/<time>/``."""
    xp.stop_trace()
