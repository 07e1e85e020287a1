"""The text of programs, and the names in it: see `spmdzero.backend.Programs`."""

import os
from collections.abc import Sequence

import torch
import torch_xla.debug.profiler as xp

from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._private import optimized_hlo, record_scopes, scope
from spmdzero.errors import SpmdZeroUsageError

__all__ = [
    "optimized_hlo",
    "record_scopes",
    "returned",
    "scope",
    "start_trace",
    "stop_trace",
    "text",
]


def returned(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices of those of `tensors` that these programs return: all, as copies if need be."""
    return list(range(len(tensors)))


def text(tensors: Sequence[torch.Tensor]) -> str:
    """The text of the program of `tensors`; empty where none of them is pending."""
    pending = zip(tensors, _private.are_pending(tensors), strict=True)
    roots = [tensor for tensor, pends in pending if pends]
    return _private.program_text(_private.annotated_program(roots)) if roots else ""


def start_trace(folder: str | os.PathLike[str]) -> None:
    """Starts a trace that `stop_trace` writes into `folder`.

    Raises:
        SpmdZeroUsageError: a trace is being recorded already.
    """
    try:
        xp.start_trace(folder)
    except RuntimeError as error:
        raise SpmdZeroUsageError(
            "a trace is being recorded already, and torch_xla records one at a time. End it first"
        ) from error


def stop_trace() -> None:
    """Ends the trace and writes it to ``<folder>/plugins/profile/<time>/``."""
    xp.stop_trace()
