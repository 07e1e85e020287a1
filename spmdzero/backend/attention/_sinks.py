"""Sinks: for each head a number beside its products in the softmax, of which no value comes.

A kernel that knows no sinks makes weights that sum up to 1. A sink takes its part of them, which
the sum of the exponentials decides that the kernel returns anyway. With the new sum and output its
backward is right for query, key and value as it is.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from spmdzero.backend.attention._form import Form


def around(function: Callable[..., Any], direction: str, form: Form) -> Callable[..., Any]:
    """A direction of kernels that know no sinks, with sinks as their last input, or mask's next.

    Args:
        function: the kernels, as `jax_function` returns them.
        direction, form: of the kernels. Sinks are `[1, heads, 1, 1]` in fp32.
    """
    count = 3 if form.mask is None else 4

    def forward(*arrays: Any) -> tuple[Any, ...]:
        *given, sinks = arrays
        if form.mask is None:
            # The one statistic is the logarithm of a sum.
            out, logarithm = function(*given)
            out, largest, total = _shared(out, logarithm, 1.0, sinks)
            return out, largest + jnp.log(total)
        out, largest, total = function(*given)
        return _shared(out, largest, total, sinks)

    def backward(*arrays: Any) -> tuple[Any, ...]:
        given, (sinks, out, *statistics, grad) = arrays[:count], arrays[count:]
        largest, total = (*statistics, 1.0)[:2]
        to_sinks = _gradient(out, grad, largest, total, sinks)
        return *function(*given, out, *statistics, grad), to_sinks

    return forward if direction == "forward" else backward


def _shared(out: Any, largest: Any, total: Any, sinks: Any) -> tuple[Any, Any, Any]:
    """Output, largest score and the sum of exponentials beside it, as the sinks leave them."""
    sink = sinks[..., 0]
    now = jnp.maximum(largest, sink)
    kept = total * jnp.exp(largest - now)
    sums = kept + jnp.exp(sink - now)
    shrunk = out.astype(jnp.float32) * (kept / sums)[..., None]
    return shrunk.astype(out.dtype), now, sums


def _gradient(out: Any, grad: Any, largest: Any, total: Any, sinks: Any) -> Any:
    product = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1)
    weights = jnp.exp(sinks[..., 0] - largest) / total
    return -jnp.sum(weights * product, axis=(0, 2))[None, :, None, None]
