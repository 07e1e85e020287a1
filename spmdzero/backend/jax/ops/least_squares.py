"""Least squares and pseudo-inverses, by singular values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax.ops._table import lowers
from spmdzero.backend.jax.ops.linalg import exact


def _cut(values: Any, shape: Any, atol: Any, rtol: Any) -> Any:
    """The threshold below which a singular value counts as 0."""
    if rtol is None:
        rtol = jnp.finfo(values.dtype).eps * max(shape[-2:])
        if atol is not None:
            rtol = jnp.where(jnp.asarray(atol) > 0, 0, rtol)
    atol = jnp.asarray(0 if atol is None else atol, values.dtype)
    rtol = jnp.asarray(rtol, values.dtype)
    largest = jnp.max(values, -1, initial=0)
    return jnp.maximum(atol, rtol * largest)[..., None]


@lowers("linalg_pinv.atol_rtol_tensor")
@exact
def pinv(self: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """The pseudo-inverse."""
    if hermitian:
        # torch reads only one triangle.
        self = jnp.tril(self) + jnp.conj(jnp.swapaxes(jnp.tril(self, -1), -1, -2))
    u, s, vh = jnp.linalg.svd(self, full_matrices=False)
    kept = s > _cut(s, self.shape, atol, rtol)
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0).astype(u.dtype)
    back = jnp.conj(jnp.swapaxes(vh, -1, -2)) * inverse[..., None, :]
    return back @ jnp.conj(jnp.swapaxes(u, -1, -2))


@lowers("linalg_lstsq")
@exact
def lstsq(
    self: Any, b: Any, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Any, Any, Any, Any]:
    """The solution with the least norm, its squared residuals, the rank, and the singular values.

    torch returns residuals only if each matrix has full rank, on which no shape can depend: here
    they are returned wherever a matrix has more rows than columns.
    """
    vector = b.ndim == 1 or (self.ndim - 1 == b.ndim and self.shape[:-1] == b.shape)
    right = b[..., None] if vector else b
    s = jnp.linalg.svd(self, compute_uv=False)
    cut = _cut(s, self.shape, None, rcond if rcond is None or rcond >= 0 else None)
    rank = jnp.sum(s > cut, -1)
    inverse = pinv(self, atol=cut[..., 0], rtol=0.0)
    solution = inverse @ right
    rows, columns = self.shape[-2:]
    residuals = jnp.zeros((0,), s.dtype)
    if rows > columns:
        residuals = jnp.sum(jnp.square(jnp.abs(self @ solution - right)), -2)
        residuals = residuals[..., 0] if vector else residuals
    none = jnp.zeros((0,), s.dtype)
    by_values = driver in ("gelsd", "gelss")
    ranked = driver in (None, "gelsy", "gelsd", "gelss")
    return (
        solution[..., 0] if vector else solution,
        residuals,
        rank if ranked else jnp.zeros((0,), jnp.int64),
        s if by_values else none,
    )
