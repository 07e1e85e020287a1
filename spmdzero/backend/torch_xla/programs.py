"""The text of programs, and the names in it: see `spmdzero.backend.Programs`."""

from collections.abc import Sequence

import torch

from spmdzero.backend._programs import AnnotatedProgram
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._private import optimized_hlo, record_scopes, scope
from spmdzero.backend.torch_xla.placeholders import Placeholders
from spmdzero.backend.torch_xla.tracing import start as start_trace
from spmdzero.backend.torch_xla.tracing import stop as stop_trace

__all__ = [
    "annotated",
    "optimized_hlo",
    "placeholders",
    "record_scopes",
    "scope",
    "start_trace",
    "stop_trace",
    "text",
]


def annotated(tensors: Sequence[torch.Tensor]) -> AnnotatedProgram:
    """The pending program that computes `tensors`, unoptimised."""
    return AnnotatedProgram(proto=_private.annotated_program(tensors)[0])


def placeholders() -> Placeholders:
    """None of a tensor yet."""
    return Placeholders()


def text(tensors: Sequence[torch.Tensor]) -> str:
    """That program as text; empty where none of `tensors` is pending."""
    pending = zip(tensors, _private.are_pending(tensors), strict=True)
    roots = [tensor for tensor, pends in pending if pends]
    return _private.program_text(_private.annotated_program(roots)[0]) if roots else ""
