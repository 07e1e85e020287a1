"""Python made programs: see `spmdzero.backend.Compiler`."""

from spmdzero.backend.torch_xla._private import start_pending
from spmdzero.backend.torch_xla.capture import compile_alone
from spmdzero.backend.torch_xla.folding import fold, no_stand_in_left, same_value, stand_in
from spmdzero.backend.torch_xla.strangers import record_uploads, strangers

__all__ = [
    "compile_alone",
    "fold",
    "no_stand_in_left",
    "record_uploads",
    "same_value",
    "stand_in",
    "start_pending",
    "strangers",
]
