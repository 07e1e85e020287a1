"""The loss of connectionist temporal classification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import lowers


def _labels(targets: Any, lengths: Any, longest: int, blank: int) -> Any:
    """`[N, 2 * longest + 1]`: each target with blanks around and between its labels."""
    places = jnp.arange(longest)
    if targets.ndim == 1:
        starts = jnp.cumsum(lengths) - lengths
        found = jnp.take(targets, starts[:, None] + places, mode="clip")
    else:
        found = targets[:, :longest]
    found = jnp.where(places < lengths[:, None], found, blank)
    apart = jnp.full((found.shape[0], 2 * longest + 1), blank, found.dtype)
    return apart.at[:, 1::2].set(found)


def _log_sum(*terms: Any) -> Any:
    stacked = jnp.stack(terms)
    top = lax.stop_gradient(jnp.max(stacked, 0))
    never = top == -jnp.inf
    base = jnp.where(never, 0, top)
    total = jnp.sum(jnp.exp(stacked - base), 0)
    return jnp.where(never, -jnp.inf, jnp.log(jnp.where(never, 1, total)) + base)


def _shifted(alpha: Any, by: int) -> Any:
    return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=-jnp.inf)[:, : alpha.shape[1]]


def _loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int
) -> tuple[Any, Any]:
    """`[N]`, the negative log likelihood, and `[N, T, 2 * longest + 1]`, that of each beginning."""
    longest = targets.shape[-1]
    if not hasattr(target_lengths, "shape"):
        longest = max(target_lengths, default=0)
    inputs, lengths = jnp.asarray(input_lengths), jnp.asarray(target_lengths)
    labels = _labels(targets, lengths, longest, blank)
    # A label may follow the label before the blank if the two differ.
    skips = labels != jnp.roll(labels, 2, 1)
    skips = skips & (jnp.arange(labels.shape[1]) % 2 == 1) & (jnp.arange(labels.shape[1]) > 1)
    said = jnp.take_along_axis(
        log_probs, jnp.broadcast_to(labels, (len(log_probs), *labels.shape)), 2
    )
    first = jnp.arange(labels.shape[1]) <= jnp.where(lengths > 0, 1, 0)[:, None]
    start = jnp.where(first, said[0], -jnp.inf)

    def step(alpha: Any, here: Any) -> tuple[Any, Any]:
        two = jnp.where(skips, _shifted(alpha, 2), -jnp.inf)
        alpha = _log_sum(alpha, _shifted(alpha, 1), two) + here
        return alpha, alpha

    _, later = lax.scan(step, start, said[1:])
    alphas = jnp.moveaxis(jnp.concatenate([start[None], later]), 0, 1)
    at_end = jnp.take_along_axis(alphas, jnp.maximum(inputs - 1, 0)[:, None, None], 1)[:, 0]
    last = jnp.take_along_axis(at_end, 2 * lengths[:, None], 1)[:, 0]
    before = jnp.take_along_axis(at_end, jnp.maximum(2 * lengths[:, None] - 1, 0), 1)[:, 0]
    total = _log_sum(last, jnp.where(lengths > 0, before, -jnp.inf))
    return -jnp.where(inputs == 0, jnp.where(lengths == 0, 0, -jnp.inf), total), alphas


@lowers("_ctc_loss", "_ctc_loss.Tensor")
def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Any, Any]:
    """The loss of each sequence, and a result that only torch's gradient needs."""
    return _loss(log_probs, targets, input_lengths, target_lengths, blank)


@lowers("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    neg_log_likelihood: Any,
    log_alpha: Any,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    """torch's gradient, which is that of the logits behind the log_softmax."""
    _, pull = jax.vjp(
        lambda x: _loss(x, targets, input_lengths, target_lengths, blank)[0], wide(log_probs)
    )
    (through,) = pull(grad)
    own = through + jnp.exp(log_probs) * grad[:, None]
    impossible = (neg_log_likelihood == jnp.inf)[:, None]
    own = jnp.where(impossible, 0 if zero_infinity else jnp.nan, own)
    inside = jnp.arange(len(log_probs))[:, None] < jnp.asarray(input_lengths)
    return jnp.where(inside[..., None], own, 0)
