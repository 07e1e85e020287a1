"""Modules and functions for models that are trained here; pure torch, usable without an engine."""

from spmdzero.nn._linear_cross_entropy import linear_cross_entropy
from spmdzero.nn._module import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]
