"""Fourier transforms."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax.ops._shapes import axis
from spmdzero.backend.jax.ops._table import lowers


def _scaled(out: Any, count: int, normalization: int) -> Any:
    """Divides by torch's norm: 0 is none, 1 the square root of the count, 2 the count."""
    return out if normalization == 0 else out / (math.sqrt(count) if normalization == 1 else count)


def _dims(self: Any, dim: Any) -> tuple[int, ...]:
    return tuple(axis(d, self.ndim) for d in dim)


@lowers("_fft_c2c")
def fft_c2c(self: Any, dim: Any, normalization: int, forward: bool) -> Any:
    """The transform from complex to complex."""
    dims = _dims(self, dim)
    if not dims:
        return self
    # Neither of these norms scales the sum.
    if forward:
        out = jnp.fft.fftn(self, axes=dims, norm="backward")
    else:
        out = jnp.fft.ifftn(self, axes=dims, norm="forward")
    return _scaled(out, math.prod(self.shape[d] for d in dims), normalization)


@lowers("_fft_r2c")
def fft_r2c(self: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    """The transform from real to complex; `onesided` keeps half of the last dim."""
    dims = _dims(self, dim)
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    out = transform(self, axes=dims, norm="backward")
    return _scaled(out, math.prod(self.shape[d] for d in dims), normalization)


@lowers("_fft_c2r")
def fft_c2r(self: Any, dim: Any, normalization: int, last_dim_size: int) -> Any:
    """The transform from the half of a complex spectrum to real."""
    dims = _dims(self, dim)
    sizes = [*(self.shape[d] for d in dims[:-1]), last_dim_size]
    out = jnp.fft.irfftn(self, s=sizes, axes=dims, norm="forward")
    return _scaled(out, math.prod(sizes), normalization)
