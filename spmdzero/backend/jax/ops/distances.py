"""Distances between rows, of one matrix or of two."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import lowers
from spmdzero.backend.jax.ops.reductions import vector_norm


def _apart(x1: Any, x2: Any) -> Any:
    return x1[..., :, None, :] - x2[..., None, :, :]


def _pairs(count: int) -> tuple[Any, Any]:
    return np.triu_indices(count, 1)


def _pulled(grad: Any, apart: Any, far: Any, p: float) -> Any:
    """The gradient of differences `[..., d]`; 0 where the distance is 0."""
    grad, far = wide(grad)[..., None], wide(far)[..., None]
    if p == 0:
        return jnp.zeros_like(apart)
    if p == 1:
        return grad * jnp.sign(apart)
    if p == math.inf:
        return jnp.where(jnp.abs(apart) == far, grad * jnp.sign(apart), 0)
    safe = jnp.where(far == 0, 1, far)
    size = jnp.where(apart == 0, 1, jnp.abs(apart))
    each = apart * size ** (p - 2) * grad / safe ** (p - 1)
    return jnp.where((far == 0) | (apart == 0), 0, each)


@lowers("_cdist_forward")
def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """The distance of each row of x1 from each row of x2."""
    return vector_norm(_apart(wide(x1), wide(x2)), p, [-1])


@lowers("_cdist_backward")
def cdist_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    """The gradient of the first rows."""
    return jnp.sum(_pulled(grad, _apart(wide(x1), wide(x2)), cdist, p), -2)


@lowers("_pdist_forward")
def pdist(self: Any, p: float = 2) -> Any:
    """The distance of each pair of rows."""
    one, other = _pairs(self.shape[0])
    return vector_norm(wide(self)[one] - wide(self)[other], p, [-1])


@lowers("_pdist_backward")
def pdist_backward(grad: Any, self: Any, p: float, pdist: Any) -> Any:
    """The gradient of the rows."""
    one, other = _pairs(self.shape[0])
    x = wide(self)
    each = _pulled(grad, x[one] - x[other], pdist, p)
    return jnp.zeros_like(x).at[one].add(each).at[other].add(-each)


@lowers("dist")
def dist(self: Any, other: Any, p: float = 2) -> Any:
    """The norm of the difference."""
    return vector_norm(wide(self) - wide(other), p)
