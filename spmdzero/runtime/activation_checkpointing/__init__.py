"""`deepspeed.runtime.activation_checkpointing`."""

from spmdzero import checkpointing

__all__ = ["checkpointing"]
