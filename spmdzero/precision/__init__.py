"""Which dtype each role of a tensor has."""

from spmdzero.precision._policy import PrecisionPolicy, dtype_named

__all__ = ["PrecisionPolicy", "dtype_named"]
