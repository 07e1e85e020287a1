"""Arrays made from numbers alone; where torch leaves memory uninitialized it is 0 here."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from spmdzero.backend.jax.ops._dtypes import cast, default_dtype, dtype_of, jax_dtype
from spmdzero.backend.jax.ops._table import lowers


def _or_default(dtype: Any) -> Any:
    return jax_dtype(default_dtype() if dtype is None else dtype)


@lowers("zeros", "empty.memory_format", "_efficientzerotensor")
def zeros(size: Any, *, dtype: Any = None, **_: Any) -> Any:
    """0 everywhere."""
    return jnp.zeros(tuple(size), _or_default(dtype))


@lowers("empty_strided")
def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    """0 everywhere; strides have no meaning here."""
    return zeros(size, dtype=dtype)


@lowers("empty_permuted")
def empty_permuted(size: Any, physical_layout: Any, *, dtype: Any = None, **_: Any) -> Any:
    """0 everywhere; the layout has no meaning here."""
    return zeros(size, dtype=dtype)


@lowers("ones")
def ones(size: Any, *, dtype: Any = None, **_: Any) -> Any:
    """1 everywhere."""
    return jnp.ones(tuple(size), _or_default(dtype))


@lowers("full")
def full(size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """One value everywhere."""
    return jnp.full(tuple(size), cast(fill_value, dtype or dtype_of(fill_value)))


@lowers("scalar_tensor")
def scalar_tensor(s: Any, *, dtype: Any = None, **_: Any) -> Any:
    """The number as a 0-dim array."""
    return cast(s, dtype or default_dtype())


@lowers("zeros_like", "empty_like")
def zeros_like(self: Any, *, dtype: Any = None, **_: Any) -> Any:
    """0 in self's shape."""
    return jnp.zeros(self.shape, jax_dtype(dtype or dtype_of(self)))


@lowers("ones_like")
def ones_like(self: Any, *, dtype: Any = None, **_: Any) -> Any:
    """1 in self's shape."""
    return jnp.ones(self.shape, jax_dtype(dtype or dtype_of(self)))


@lowers("full_like")
def full_like(self: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """One value in self's shape."""
    return jnp.full(self.shape, cast(fill_value, dtype or dtype_of(self)))


@lowers("new_zeros", "new_empty")
def new_zeros(self: Any, size: Any, *, dtype: Any = None, **_: Any) -> Any:
    """0 in self's dtype."""
    return jnp.zeros(tuple(size), jax_dtype(dtype or dtype_of(self)))


@lowers("new_empty_strided")
def new_empty_strided(self: Any, size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    """0 in self's dtype; strides have no meaning here."""
    return new_zeros(self, size, dtype=dtype)


@lowers("new_ones")
def new_ones(self: Any, size: Any, *, dtype: Any = None, **_: Any) -> Any:
    """1 in self's dtype."""
    return jnp.ones(tuple(size), jax_dtype(dtype or dtype_of(self)))


@lowers("new_full")
def new_full(self: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """One value in self's dtype."""
    return jnp.full(tuple(size), cast(fill_value, dtype or dtype_of(self)))


@lowers("arange.start_step")
def arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> Any:
    """Numbers from start to below end, by steps."""
    numbers = (start, end, step)
    whole = all(isinstance(x, int) for x in numbers)
    if dtype is None:
        dtype = torch.int64 if whole else default_dtype()
    if whole or not dtype.is_floating_point:
        return jnp.asarray(np.arange(*map(int, numbers)), jax_dtype(dtype))
    count = math.ceil((end - start) / step)
    return jnp.asarray(start + np.arange(count) * np.float64(step), jax_dtype(dtype))


@lowers("arange.start")
def arange_start(start: Any, end: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Numbers from start to below end."""
    return arange(start, end, dtype=dtype)


@lowers("arange")
def arange_end(end: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Numbers from 0 to below end."""
    return arange(0, end, dtype=dtype)


@lowers("eye", "eye.m")
def eye(n: int, m: int | None = None, *, dtype: Any = None, **_: Any) -> Any:
    """1 on the diagonal."""
    return jnp.eye(n, m, dtype=_or_default(dtype))


@lowers("linspace")
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, **_: Any) -> Any:
    """Makes as many numbers as `steps`, from start to end."""
    real = np.float64 if not isinstance(start, complex) else np.complex128
    values = np.linspace(start, end, steps, dtype=real)
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        values = np.trunc(values)
    return jnp.asarray(values, _or_default(dtype))


@lowers("tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, **_: Any) -> Any:
    """The indices of the lower triangle."""
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)), jax_dtype(dtype or torch.int64))


@lowers("triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, **_: Any) -> Any:
    """The indices of the upper triangle."""
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)), jax_dtype(dtype or torch.int64))
