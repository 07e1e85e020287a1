"""Attention, as torch dispatches it for CPU tensors; trilinear products."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import UnsupportedError, lowers


def _attention(
    query: Any, key: Any, value: Any, causal: bool, mask: Any, scale: float | None
) -> tuple[Any, Any]:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    precision = lax.Precision.HIGHEST
    scores = jnp.einsum("...qd,...kd->...qk", query, key, precision=precision) * scale
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + wide(mask)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    top = jnp.max(scores, -1, keepdims=True)
    # A fully masked row attends to nothing.
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, -1, keepdims=True)
    weights = exponentials / jnp.where(total == 0, 1, total)
    out = jnp.einsum("...qk,...kd->...qd", weights, value, precision=precision)
    return out, (jnp.log(total) + top)[..., 0]


@lowers("_scaled_dot_product_flash_attention_for_cpu")
def attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """The attention of each query, and the logarithms of the sums of its exponentials."""
    if dropout_p:
        raise UnsupportedError(
            "torch's kernel has no dropout either", "Call F.scaled_dot_product_attention"
        )
    return _attention(wide(query), wide(key), wide(value), is_causal, attn_mask, scale)


@lowers("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        return _attention(q, k, v, is_causal, attn_mask, scale)[0]

    _, pull = jax.vjp(forward, wide(query), wide(key), wide(value))
    return pull(wide(grad_out))


@lowers("_trilinear")
def trilinear(
    i1: Any,
    i2: Any,
    i3: Any,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sumdim: Any,
    unroll_dim: int = 1,
) -> Any:
    """The product of three arrays, after inserting dims of 1, summed over dims."""
    a, b, c = (
        jnp.expand_dims(wide(x), tuple(dims))
        for x, dims in ((i1, expand1), (i2, expand2), (i3, expand3))
    )
    return jnp.sum(a * b * c, tuple(sumdim))
