"""DeepSpeed's checkpoints, read and written without DeepSpeed."""

from spmdzero.store.deepspeed._read import read, recognises

__all__ = ["read", "recognises"]
