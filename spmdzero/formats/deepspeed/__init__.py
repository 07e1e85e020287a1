"""Reads and writes DeepSpeed's checkpoints without DeepSpeed."""

from spmdzero.formats.deepspeed._optimizer import NUMBER, Order
from spmdzero.formats.deepspeed._read import newest_complete, read, recognises
from spmdzero.formats.deepspeed._schedule_position import without_debt
from spmdzero.formats.deepspeed._splits import ALONE, Split, TensorParallel
from spmdzero.formats.deepspeed._target import Target
from spmdzero.formats.deepspeed._write import write_regular, write_universal

__all__ = [
    "ALONE",
    "NUMBER",
    "Order",
    "Split",
    "Target",
    "TensorParallel",
    "newest_complete",
    "read",
    "recognises",
    "without_debt",
    "write_regular",
    "write_universal",
]
