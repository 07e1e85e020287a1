"""The text of programs, and the names in it: see `spmdzero.backend.Programs`."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import torch

from spmdzero.backend.jax import arrays
from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.graph._listing import listing
from spmdzero.backend.jax.graph._options import of_devices
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._values import Scoped
from spmdzero.backend.jax.lowering import lowered, returned
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


def scope(name: str) -> contextlib.AbstractContextManager[None]:
    """Context that names the operations inside `name` in the compiled program."""
    # torch_xla numbers its scopes, and code that reads names out of HLO looks for the number.
    return Scoped(f"{name}.0")


def record_scopes(enabled: bool, *, by: Any) -> None:
    """Does nothing: names are always recorded, are no part of a program's key, and cost nothing."""


def optimized_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """The optimised, partitioned HLO of the program that computes `tensors`."""
    return lowered(tensors).compile(compiler_options=of_devices(compilations.mesh)).as_text()


def text(tensors: Sequence[torch.Tensor]) -> str:
    """The text of the program of `tensors`; empty where nothing is left to compute."""
    pending = zip(tensors, arrays.are_pending(tensors), strict=True)
    roots = [tensor for tensor, pends in pending if pends]
    return listing(Graph.of(list(map(value_of, roots)))[0]) if roots else ""


def start_trace(folder: str | os.PathLike[str]) -> None:
    """Records what host and devices do, for TensorBoard and Perfetto.

    Raises:
        SpmdZeroUsageError: a trace is being recorded already.
    """
    try:
        jax.profiler.start_trace(folder)
    except RuntimeError as error:
        raise SpmdZeroUsageError(
            "a trace is being recorded already, and JAX records one at a time. End it first"
        ) from error


def stop_trace() -> None:
    """Ends the trace and writes it to ``<folder>/plugins/profile/<time>/``."""
    jax.profiler.stop_trace()
