"""A ZeRO step: sums the gradients of micro-batches, and updates parameters at the boundary."""
