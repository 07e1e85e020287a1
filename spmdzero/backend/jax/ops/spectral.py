"""Fourier transforms."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax.ops._shapes import axis
from spmdzero.backend.jax.ops._table import lowers


def _scaled(out: Any, count: int, normalization: int) -> Any:
    """Torch numbers its norms: 0 for none, 1 for the square root of the count, 2 for the count."""
    return out if normalization == 0 else out / (math.sqrt(count) if normalization == 1 else count)


def _dims(self: Any, dim: Any) -> tuple[int, ...]:
    return tuple(axis(d, self.ndim) for d in dim)


@lowers("_fft_c2c")
def fft_c2c(self: Any, dim: Any, normalization: int, forward: bool) -> Any:
    """From complex to complex."""
    dims = _dims(self, dim)
    if not dims:
        return self
    # Each of these norms leaves the sum as it is.
    if forward:
        out = jnp.fft.fftn(self, axes=dims, norm="backward")
    else:
        out = jnp.fft.ifftn(self, axes=dims, norm="forward")
    return _scaled(out, math.prod(self.shape[d] for d in dims), normalization)


@lowers("_fft_r2c")
def fft_r2c(self: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    """From real to complex, of the last of the dims only the half that tells the rest."""
    dims = _dims(self, dim)
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    out = transform(self, axes=dims, norm="backward")
    return _scaled(out, math.prod(self.shape[d] for d in dims), normalization)


@lowers("_fft_c2r")
def fft_c2r(self: Any, dim: Any, normalization: int, last_dim_size: int) -> Any:
    """From the half of a complex spectrum to real."""
    dims = _dims(self, dim)
    sizes = [*(self.shape[d] for d in dims[:-1]), last_dim_size]
    out = jnp.fft.irfftn(self, s=sizes, axes=dims, norm="forward")
    return _scaled(out, math.prod(sizes), normalization)
