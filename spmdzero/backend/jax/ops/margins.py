"""Losses with a margin, one of which torch would decompose; leaky units with noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import lowers


def _reduced(losses: Any, reduction: int) -> Any:
    return losses if reduction == 0 else jnp.mean(losses) if reduction == 1 else jnp.sum(losses)


@lowers("multi_margin_loss_backward")
def multi_margin_loss_backward(
    grad_output: Any,
    self: Any,
    target: Any,
    p: Any,
    margin: Any,
    weight: Any = None,
    reduction: int = 1,
) -> Any:
    """The gradient of the margins by which the right class doesn't lead the others."""
    classes = jnp.atleast_1d(target)

    def forward(x: Any) -> Any:
        rows = jnp.atleast_2d(x)
        right = jnp.take_along_axis(rows, classes[:, None], 1)
        short = margin - right + rows
        each = jnp.where(short > 0, short**p, 0)
        if weight is not None:
            each = each * wide(weight)[classes][:, None]
        others = jnp.arange(rows.shape[1]) != classes[:, None]
        losses = jnp.sum(jnp.where(others, each, 0), 1) / rows.shape[1]
        return _reduced(losses if x.ndim > 1 else losses[0], reduction)

    out, pull = jax.vjp(forward, wide(self))
    return pull(jnp.broadcast_to(wide(grad_output), out.shape))[0]


def _multilabel(x: Any, target: Any, reduction: int) -> tuple[Any, Any]:
    """The loss, and a mask of the right classes."""
    rows, labels = jnp.atleast_2d(x), jnp.atleast_2d(target)
    # The labels end before the first negative one.
    valid = jnp.cumprod(labels >= 0, 1).astype(bool)
    classes = jnp.arange(rows.shape[1])
    is_right = jnp.any(valid[:, :, None] & (labels[:, :, None] == classes), 1)
    right = jnp.take_along_axis(rows, jnp.maximum(labels, 0), 1)
    short = 1 - right[:, :, None] + rows[:, None, :]
    counted = valid[:, :, None] & ~is_right[:, None, :] & (short > 0)
    losses = jnp.sum(jnp.where(counted, short, 0), (1, 2)) / max(rows.shape[1], 1)
    return _reduced(losses if x.ndim > 1 else losses[0], reduction), is_right


@lowers("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self: Any, target: Any, reduction: int) -> tuple[Any, Any]:
    """The margins by which the right classes don't lead the others, and a mask of the right ones.

    torch's own decomposition also counts labels after the last one.
    """
    loss, is_right = _multilabel(wide(self), target, reduction)
    return loss, is_right.reshape(target.shape).astype(self.dtype)


@lowers("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    grad_output: Any, self: Any, target: Any, reduction: int, is_target: Any
) -> Any:
    """The gradient of the margins by which the right classes don't lead the others."""
    out, pull = jax.vjp(lambda x: _multilabel(x, target, reduction)[0], wide(self))
    return pull(jnp.broadcast_to(wide(grad_output), out.shape))[0]


@lowers("rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    grad_output: Any,
    self: Any,
    noise: Any,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Any:
    """The gradient times the slopes that the forward drew, or times their mean."""
    grad = wide(grad_output)
    if training and upper - lower > 1e-6:
        return grad * wide(noise)
    return jnp.where(self > 0, grad, grad * ((lower + upper) / 2))
