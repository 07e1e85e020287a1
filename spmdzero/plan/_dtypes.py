"""Sizes of the dtypes that a plan names."""

from spmdzero.errors import SpmdZeroUsageError

_ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def itemsize(dtype: str) -> int:
    """Bytes per element of `dtype`, a name such as ``"bfloat16"``.

    Raises:
        SpmdZeroUsageError: the name is not a dtype that a plan knows.
    """
    if dtype not in _ITEMSIZE:
        raise SpmdZeroUsageError(f"unknown dtype {dtype!r}: a plan knows {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[dtype]
