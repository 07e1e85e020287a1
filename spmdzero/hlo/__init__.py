"""Reading optimised HLO as text: instructions, collectives, matrix products and memory."""

from spmdzero.hlo._collectives import Collective, read_collectives
from spmdzero.hlo._cycles import Kernel, Operation, each_operation, read_schedule
from spmdzero.hlo._liveness import entry_argument_bytes, peak_temporary_bytes
from spmdzero.hlo._matmuls import Matmul, read_matmuls
from spmdzero.hlo._meetings import between_hosts
from spmdzero.hlo._module import Instruction, Module, Shape
from spmdzero.hlo._names import operation_of
from spmdzero.hlo._text import parse

__all__ = [
    "Collective",
    "Instruction",
    "Kernel",
    "Matmul",
    "Module",
    "Operation",
    "Shape",
    "between_hosts",
    "each_operation",
    "entry_argument_bytes",
    "operation_of",
    "parse",
    "peak_temporary_bytes",
    "read_collectives",
    "read_matmuls",
    "read_schedule",
]
