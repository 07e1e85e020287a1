"""Operations of 8 bits: see `spmdzero.backend.forms._quantized`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from spmdzero.backend.forms._quantized import largest
from spmdzero.backend.jax._versions import is_for_tpu
from spmdzero.backend.jax.ops._dtypes import jax_dtype
from spmdzero.backend.jax.ops._table import lowers

# Sums of so many products of int8 fit int32.
_EXACT = 2**31 // 127**2


@lowers("spmdzero.absmax")
def absmax(x: Any, dims: Sequence[int]) -> Any:
    """The largest absolute value, fp32."""
    # In the dtype of x, in which it is exact, and half of what fp32 would be to read.
    size = jnp.max(jnp.abs(x), tuple(dims) or None, keepdims=bool(dims), initial=0)
    return size.astype(jnp.float32)


@lowers("spmdzero.power_of_two")
def power_of_two(x: Any) -> Any:
    """The largest power of two that is no larger."""
    mantissa, exponent = jnp.frexp(x)
    power = jnp.ldexp(jnp.ones_like(x), exponent - 1)
    return jnp.where(jnp.isfinite(mantissa) & (x > 0), power, x)


@lowers("spmdzero.quantized")
def quantized(x: Any, scale: Any, dtype: torch.dtype) -> Any:
    """`x * scale`, in 8 bits."""
    most, scaled = largest(dtype), x.astype(jnp.float32) * scale
    if dtype is torch.int8:
        scaled = jnp.round(scaled)
    clipped = jnp.clip(scaled, -most, most)
    if dtype is not torch.int8 and not is_for_tpu():
        clipped = _on_the_grid(clipped, jnp.finfo(jax_dtype(dtype)))
    return clipped.astype(jax_dtype(dtype))


def _on_the_grid(x: Any, of: Any) -> Any:
    """fp32, rounded to numbers of a narrower dtype: XLA's CPU compiler rounds to fp16 first."""
    _, exponent = jnp.frexp(x)
    step = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, int(of.minexp)) - int(of.nmant))
    return jnp.where(jnp.isnan(x), x, jnp.round(x / step) * step)


@lowers("spmdzero.scaled_product")
def scaled_product(
    a: Any,
    b: Any,
    along_a: Sequence[int],
    along_b: Sequence[int],
    scale_a: Any,
    scale_b: Any,
    dtype: torch.dtype,
) -> Any:
    """The product of two arrays of 8 bits, times both scales."""
    along = tuple(i % a.ndim for i in along_a), tuple(i % b.ndim for i in along_b)
    product = _of_integers if a.dtype == jnp.int8 else _of_floats
    return (product(a, b, along) * scale_a * scale_b).astype(jax_dtype(dtype))


def _of_floats(a: Any, b: Any, along: Any) -> Any:
    if not is_for_tpu():
        # Other compilers have few such products. In fp32 each is exact.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(
        a, b, (along, ((), ())), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _of_integers(a: Any, b: Any, along: Any) -> Any:
    longest = max(range(len(along[0])), key=lambda i: a.shape[along[0][i]])
    rest = 1
    for place, dim in enumerate(along[0]):
        rest *= 1 if place == longest else a.shape[dim]
    length, most = a.shape[along[0][longest]], max(1, _EXACT // rest)
    total: Any = 0.0
    for first in range(0, max(length, 1), most):
        of_a, of_b = (
            jax.lax.slice_in_dim(x, first, min(first + most, length), axis=dims[longest])
            for x, dims in ((a, along[0]), (b, along[1]))
        )
        part = _sum_of_integers(of_a, of_b, along).astype(jnp.float32)
        total = part if first == 0 else total + part
    return total


def _sum_of_integers(a: Any, b: Any, along: Any) -> Any:
    if not is_for_tpu() and jax.default_backend() == "cpu":
        # XLA's CPU compiler has no fast product of integers, and fp64 is exact.
        a, b = a.astype(jnp.float64), b.astype(jnp.float64)
        return lax.dot_general(a, b, (along, ((), ())), precision=lax.Precision.HIGHEST)
    return lax.dot_general(a, b, (along, ((), ())), preferred_element_type=jnp.int32)
