"""Compiles functions that are written in Python: see `spmdzero.backend.Compiler`."""

from spmdzero.backend.torch_xla._private import start_pending
from spmdzero.backend.torch_xla.capture import compile_alone
from spmdzero.backend.torch_xla.fixed_values import record_uploads, unknown_values
from spmdzero.backend.torch_xla.folding import fold, no_stand_in_left, same_value, stand_in

__all__ = [
    "compile_alone",
    "fold",
    "no_stand_in_left",
    "record_uploads",
    "same_value",
    "stand_in",
    "start_pending",
    "unknown_values",
]
