"""`deepspeed.checkpoint`: helpers for files of tensors."""
