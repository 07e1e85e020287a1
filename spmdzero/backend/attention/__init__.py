"""Attention by Pallas kernels in programs for TPUs: the calls they compute, and the kernels.

A backend provides the way in which an operation of its programs runs them.
"""

from spmdzero.backend.attention._form import Form, dtype_name
from spmdzero.backend.attention._function import Direction, Kernels, jax_function
from spmdzero.backend.attention._mode import AttentionKernels

__all__ = [
    "AttentionKernels",
    "Direction",
    "Form",
    "Kernels",
    "dtype_name",
    "jax_function",
]
