"""Attention by Pallas kernels, in programs for TPUs."""

from spmdzero.backend.torch_xla.attention._mode import AttentionKernels

__all__ = ["AttentionKernels"]
