"""Conversion between torch's dtypes and JAX's, and torch's type promotion for jax arrays."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_NAMES = {
    "bool": "bool_",
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"complex{bits}": f"complex{bits}" for bits in (64, 128)},
    "bfloat16": "bfloat16",
    **{
        f"float8_{kind}": f"float8_{kind}"
        for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    },
}
# Older versions of torch or JAX lack the newest float8 types.
_TO_JAX = {
    getattr(torch, theirs): np.dtype(getattr(jnp, ours))
    for theirs, ours in _NAMES.items()
    if hasattr(torch, theirs) and hasattr(jnp, ours)
}
_TO_TORCH = {ours: theirs for theirs, ours in _TO_JAX.items()}
_COMPLEX = {torch.float64: torch.complex128}


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype of JAX that holds the same values."""
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise TypeError(f"JAX has no dtype for {dtype}") from None


def torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype of torch that holds the same values."""
    try:
        return _TO_TORCH[np.dtype(dtype)]
    except KeyError:
        raise TypeError(f"torch has no dtype for {dtype}") from None


_default: contextvars.ContextVar[torch.dtype | None] = contextvars.ContextVar(
    "default dtype", default=None
)


def default_dtype() -> torch.dtype:
    """torch's default dtype at the time when the operation being lowered was recorded."""
    return _default.get() or torch.get_default_dtype()


@contextlib.contextmanager
def default_dtype_is(dtype: torch.dtype) -> Iterator[None]:
    """Context in which operations are lowered as recorded under this default dtype."""
    before = _default.set(dtype)
    try:
        yield
    finally:
        _default.reset(before)


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    """A Python float that is an input of the program.

    Attributes:
        array: 0-dim fp64.
    """

    array: Any


def is_number(x: Any) -> bool:
    """Whether x is a Python number, which torch also passes where it declares a Tensor."""
    return isinstance(x, (bool, int, float, complex, Number))


def dtype_of(x: Any) -> torch.dtype:
    """The torch dtype of an array or of a Python number."""
    if is_number(x):
        if isinstance(x, bool):
            return torch.bool
        if isinstance(x, int):
            return torch.int64
        default = default_dtype()
        return default if isinstance(x, float | Number) else _COMPLEX.get(default, torch.complex64)
    return torch_dtype(x.dtype)


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether the dtype is floating point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def _promote(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.promote_types(a, b)


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """torch's `combine_categories`: a lower rank widens the dtype only by its category."""
    if higher is None or lower is None or higher.is_complex:
        return lower if higher is None else higher
    if higher.is_floating_point:
        return _COMPLEX.get(higher, torch.complex64) if lower.is_complex else higher
    if higher == torch.bool or is_inexact(lower):
        return _promote(higher, lower)
    return higher


def result_type(*xs: Any) -> torch.dtype:
    """`torch.result_type` of any number of arrays and Python numbers."""
    dims = zeros = numbers = None
    for x in xs:
        if is_number(x):
            numbers = _promote(numbers, dtype_of(x))
        elif x.ndim:
            dims = _promote(dims, dtype_of(x))
        else:
            zeros = _promote(zeros, dtype_of(x))
    result = _combine(dims, _combine(zeros, numbers))
    assert result is not None
    return result


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels compute: float32 for floats of less than 32 bits."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself if it is inexact, else torch's default dtype."""
    return dtype if is_inexact(dtype) else default_dtype()


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """The array (or number) in this dtype; None changes nothing."""
    if isinstance(x, Number):
        x = x.array
    if dtype is None:
        return x
    if not is_number(x) and not dtype.is_complex and jnp.iscomplexobj(x):
        # torch drops the imaginary part silently, where JAX warns; for bool both parts count.
        x = x != 0 if dtype == torch.bool else jnp.real(x)
    wanted = jax_dtype(dtype)
    if isinstance(x, jax.Array) and x.dtype == wanted and not x.weak_type:
        # Return early: JAX takes a tenth of a millisecond to find that nothing has to be done.
        return x
    return jnp.asarray(x, wanted)


def common(*xs: Any) -> tuple[Any, ...]:
    """The operands promoted as in torch, and half precision further to float32 for one rounding."""
    dtype = math_dtype(result_type(*xs))
    return tuple(cast(x, dtype) for x in xs)


def common_float(*xs: Any) -> tuple[Any, ...]:
    """The operands as of `common`, with integers in torch's default floating dtype."""
    dtype = math_dtype(float_dtype(result_type(*xs)))
    return tuple(cast(x, dtype) for x in xs)


def wide(x: Any) -> Any:
    """The array, half precision as float32; None stays None."""
    return None if x is None else cast(x, math_dtype(dtype_of(x)))


def wide_float(x: Any) -> Any:
    """The array as floating point, half precision as float32."""
    return common_float(x)[0]
