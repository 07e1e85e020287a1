"""Attention on GPUs: cuDNN's, by the operations with which JAX calls it.

`jax._src.cudnn.fused_attention_stablehlo`, run with jax 0.11.2 and lowered with jax 0.12.0.1, which
adds a function of the scores. Forward and backward are called directly, because torch's autograd
calls them, not JAX's; and without JAX's rules of how they are divided, because a device of the
replica region has rows and heads of its own.
"""

import functools
from collections.abc import Collection
from typing import Any

from jax import numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from spmdzero.backend.attention._form import Form
from spmdzero.backend.attention._private import are_as_known

# The parameters of JAX's private functions, on which the calls below rely.
_GIVEN = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
    "page_table_k", "page_table_v",
)  # fmt: skip
_OPTIONS = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout",
    "sliding_window_length",
)  # fmt: skip
# No function of the scores, of no arguments: before jax 0.12 it is no parameter.
_SCORES = {"score_mod_args": (), "score_mod": None}
_FORWARD = (*_GIVEN, "score_mod_args", *_OPTIONS, "score_mod", "is_training")
_BACKWARD = (
    *_GIVEN, "activation", "fwd_output", "grad_output", "score_mod_args", *_OPTIONS, "score_mod",
)  # fmt: skip


def _are_known(*, without: Collection[str] = ()) -> bool:
    known = {
        "_dot_product_attention_fwd_impl": _FORWARD,
        "_dot_product_attention_bwd_impl": _BACKWARD,
    }
    return are_as_known(
        cudnn,
        {name: tuple(p for p in given if p not in without) for name, given in known.items()},
    )


@functools.cache
def _has_scores() -> bool:
    return _are_known()


@functools.cache
def is_as_known() -> bool:
    """Whether the private functions of the installed JAX have the parameters that were tested."""
    return _has_scores() or _are_known(without=_SCORES)


def _options(form: Form) -> dict[str, Any]:
    return {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # neither a bias nor its gradient
        "mask_type": cudnn.MaskType.CAUSAL if form.causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BNTH.value,
        "sliding_window_length": form.window,
        **(_SCORES if _has_scores() else {}),
    }


def forward(form: Form, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The output, and the logarithms of the sums of exponentials, `[batch, heads, q_length]`."""
    run: Any = cudnn._dot_product_attention_fwd_impl
    out, logsumexp = run(q, k, v, *_unused(q), **_options(form), is_training=True)
    return out, logsumexp


def backward(
    form: Form, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, grad: Any
) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value."""
    run: Any = cudnn._dot_product_attention_bwd_impl
    d_q, d_k, d_v = run(q, k, v, *_unused(q), logsumexp, out, grad, **_options(form))
    return d_q, d_k, d_v


def _unused(q: Any) -> list[Any]:
    return [jnp.zeros(0, q.dtype)] * (len(_GIVEN) - 3)
