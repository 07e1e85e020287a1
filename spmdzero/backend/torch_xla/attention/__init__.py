"""Attention's kernels in programs of torch_xla: lowered by JAX, one operation there."""

from spmdzero.backend.torch_xla.attention._kernels import KERNELS

__all__ = ["KERNELS"]
