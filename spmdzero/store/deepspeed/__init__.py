"""DeepSpeed's checkpoints, read and written without DeepSpeed."""

from spmdzero.store.deepspeed._read import read, recognises
from spmdzero.store.deepspeed._target import Target
from spmdzero.store.deepspeed._unsharded import Order
from spmdzero.store.deepspeed._write import write_regular, write_universal

__all__ = ["Order", "Target", "read", "recognises", "write_regular", "write_universal"]
