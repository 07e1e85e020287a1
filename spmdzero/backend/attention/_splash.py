"""Attention with a mask known beforehand: JAX's splash attention, which skips hidden blocks.

`jax.experimental.pallas.ops.tpu.splash_attention`, tested with jax 0.7.1 and 0.12.0. Its forward
and backward are called directly, because torch's autograd calls them, not JAX's. Its masks stay
NumPy arrays, because an array of JAX's would start a backend.
"""

import functools
import operator
from typing import Any

from jax import vmap
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

from spmdzero.backend.attention._form import Form, block_of
from spmdzero.backend.attention._private import are_as_known

_OF_ONE_DEVICE = {"downcast_smem_data": True, "head_shards": 1, "q_seq_shards": 1}


# The parameters of JAX's private functions, on which the calls below rely.
_FORWARD = (
    "fwd_mask_info", "q", "k", "v", "segment_ids", "sinks", "mask_value", "is_mqa", "block_sizes",
    "residual_checkpoint_name", "save_residuals", "mask_function", "attn_logits_soft_cap",
    "interpret",
)  # fmt: skip
_BACKWARD = (
    "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name",
    "mask_function", "attn_logits_soft_cap", "interpret", "res", "do",
)  # fmt: skip


@functools.cache
def is_as_known() -> bool:
    """Whether the private functions of the installed JAX have the parameters that were tested."""
    known = {"_splash_attention_forward": _FORWARD, "_splash_attention_bwd": _BACKWARD}
    return are_as_known(splash, known)


class _Seen(masks._ComputableMask):
    """The mask in which query i sees key j < `kv_used` as `form` is causal and has a window."""

    def __init__(self, form: Form) -> None:
        used, causal, window = form.kv_used, form.causal, form.window
        self._key = (form.q_length, form.kv_length, used, causal, window)

        def seen(q_ids: Any, kv_ids: Any) -> Any:
            parts = []
            if causal:
                parts.append(q_ids >= kv_ids)
            if window is not None:
                parts.append(q_ids - kv_ids < window)
                if not causal:
                    parts.append(kv_ids - q_ids < window)
            if used < form.kv_length:
                # Compare both ids, to get the shape that is asked for.
                parts.append((kv_ids < used) & (q_ids >= 0))
            return functools.reduce(operator.and_, parts)

        super().__init__(shape=self._key[:2], mask_function=seen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _mask(form: Form) -> masks.MultiHeadMask:
    if form.causal or form.window is not None or form.kv_used < form.kv_length:
        mask: masks.Mask = _Seen(form)
    else:
        mask = masks.FullMask((form.q_length, form.kv_length))
    return masks.MultiHeadMask([mask] * form.heads)


def _is_fused(form: Form) -> bool:
    """Whether a single kernel is the whole backward pass.

    It writes the query's gradient once for each block of keys, to be summed afterwards. With more
    than one block that sum costs more than a separate kernel for this gradient, which computes two
    products again: with Llama's 2,048 tokens on v6e, 39 ms of a step as against 8 ms.
    """
    return form.kv_length == block_of(form.kv_length)


def _backward_blocks(form: Form) -> tuple[int, int]:
    """Numbers of queries and keys in a block of the kernel for the gradients of key and value."""
    if _is_fused(form):
        return block_of(form.q_length), block_of(form.kv_length)
    return form.q_block, form.kv_block


def _blocks(form: Form) -> splash.BlockSizes:
    compute, fused = min(form.kv_block, 512), _is_fused(form)
    q_block, kv_block = _backward_blocks(form)
    return splash.BlockSizes(
        block_q=form.q_block,
        block_kv=form.kv_block,
        block_kv_compute=compute,
        block_q_dkv=q_block,
        block_kv_dkv=kv_block,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else form.q_block,
        block_kv_dq=None if fused else form.kv_block,
        use_fused_bwd_kernel=fused,
    )


def forward(form: Form, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The output, and the logarithms of the sums of exponentials, `[batch, heads, q_length]`."""
    seen, function = info.process_mask(_mask(form), (form.q_block, form.kv_block), **_OF_ONE_DEVICE)

    def of_a_row(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        run: Any = splash._splash_attention_forward
        out, (logsumexp,) = run(
            seen, q, k, v, None, None,
            mask_value=splash.DEFAULT_MASK_VALUE, is_mqa=False, block_sizes=_blocks(form),
            residual_checkpoint_name=None, save_residuals=True, mask_function=function,
            attn_logits_soft_cap=form.soft_cap, interpret=form.interpret,
        )  # fmt: skip
        return out, logsumexp

    return vmap(of_a_row)(q, k, v)


def backward(
    form: Form, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, grad: Any
) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value."""
    mask, fused = _mask(form), _is_fused(form)
    seen, function = info.process_mask_dkv(
        mask, _backward_blocks(form), shrink_grid=not fused, **_OF_ONE_DEVICE
    )
    blocks = (form.q_block, form.kv_block)
    by_query = None if fused else info.process_mask(mask, blocks, **_OF_ONE_DEVICE)[0]
    of_a_row = functools.partial(
        splash._splash_attention_bwd, False, splash.DEFAULT_MASK_VALUE, False, _blocks(form),
        None, function, form.soft_cap, form.interpret,
    )  # fmt: skip

    def gradients(*given: Any) -> tuple[Any, Any, Any]:
        q, k, v, out, logsumexp, grad = given
        found = of_a_row((q, k, v, None, None, out, logsumexp, by_query, seen), grad)
        return found[3:6]

    return vmap(gradients)(q, k, v, out, logsumexp, grad)
