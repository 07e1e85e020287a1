"""`deepspeed.ops`: optimizers by name, to be handed to `initialize`."""

from spmdzero.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
