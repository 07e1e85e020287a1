"""DeepSpeed's checkpoints, read and written without DeepSpeed."""

from spmdzero.store.deepspeed._owed import without_debt
from spmdzero.store.deepspeed._read import read, recognises
from spmdzero.store.deepspeed._target import Target
from spmdzero.store.deepspeed._unsharded import NUMBER, Order
from spmdzero.store.deepspeed._write import write_regular, write_universal

__all__ = [
    "NUMBER",
    "Order",
    "Target",
    "read",
    "recognises",
    "without_debt",
    "write_regular",
    "write_universal",
]
