"""Attention's kernels in torch_xla's programs: lowered by JAX, and one operation there."""

from spmdzero.backend.torch_xla.attention._kernels import KERNELS

__all__ = ["KERNELS"]
