"""Attention by Pallas kernels in programs for TPUs: the calls they compute, and the kernels.

A backend provides the way in which an operation of its programs runs them.
"""

from spmdzero.backend.attention._form import Form
from spmdzero.backend.attention._function import Direction, Kernels, jax_function
from spmdzero.backend.attention._mode import AttentionKernels
from spmdzero.backend.attention._transformers import masks_without_reading

__all__ = [
    "AttentionKernels",
    "Direction",
    "Form",
    "Kernels",
    "jax_function",
    "masks_without_reading",
]
