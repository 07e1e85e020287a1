"""Layer, group and batch norm and their backward passes; half precision computes in float32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdzero.backend.jax._versions import is_for_tpu
from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import lowers


def _moments(x: Any, dims: Any, eps: float) -> tuple[Any, Any]:
    mean = jnp.mean(x, dims, keepdims=True)
    return mean, lax.rsqrt(jnp.mean(jnp.square(x - mean), dims, keepdims=True) + eps)


@lowers("native_layer_norm")
def native_layer_norm(
    input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    """The input normalised over its last dims, the mean, and 1 / the deviation."""
    x, w, b = wide(input), wide(weight), wide(bias)
    mean, rstd = _moments(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)), eps)
    out = (x - mean) * rstd
    out = out if w is None else out * w
    return out if b is None else out + b, mean, rstd


@lowers("native_layer_norm_backward")
def native_layer_norm_backward(
    grad_out: Any,
    input: Any,
    normalized_shape: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Any,
) -> tuple[Any, Any, Any]:
    """The gradients of input, weight and bias for which the mask asks."""
    grad, x, mean, rstd, w = (wide(v) for v in (grad_out, input, mean, rstd, weight))
    outer = tuple(range(x.ndim - len(normalized_shape)))
    inner = tuple(range(len(outer), x.ndim))
    normed = (x - mean) * rstd
    grad_x = None
    if output_mask[0]:
        scaled = grad if w is None else grad * w
        grad_x = rstd * (
            scaled
            - jnp.mean(scaled, inner, keepdims=True)
            - normed * jnp.mean(scaled * normed, inner, keepdims=True)
        )
    grad_w = jnp.sum(grad * normed, outer) if output_mask[1] and w is not None else None
    grad_b = jnp.sum(grad, outer) if output_mask[2] and bias is not None else None
    return grad_x, grad_w, grad_b


@lowers("native_group_norm")
def native_group_norm(
    input: Any, weight: Any, bias: Any, n: int, c: int, area: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    """The input normalised over each group of channels, the means, and 1 / the deviations."""
    x = wide(input).reshape(n, group, -1)
    mean, rstd = _moments(x, (2,), eps)
    out = ((x - mean) * rstd).reshape(n, c, area)
    out = out if weight is None else out * wide(weight).reshape(c, 1)
    out = out if bias is None else out + wide(bias).reshape(c, 1)
    return out.reshape(input.shape), mean[..., 0], rstd[..., 0]


@lowers("native_group_norm_backward")
def native_group_norm_backward(
    grad_out: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    n: int,
    c: int,
    area: int,
    group: int,
    output_mask: Any,
) -> tuple[Any, Any, Any]:
    """The gradients of input, weight and bias for which the mask asks."""
    grad, x = wide(grad_out).reshape(n, c, area), wide(input).reshape(n, group, -1)
    mean, rstd = wide(mean).reshape(n, group, 1), wide(rstd).reshape(n, group, 1)
    normed = (x - mean) * rstd
    grad_x = grad_w = grad_b = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * wide(weight).reshape(c, 1)
        scaled = scaled.reshape(x.shape)
        about = normed * jnp.mean(scaled * normed, 2, keepdims=True)
        grad_x = rstd * (scaled - jnp.mean(scaled, 2, keepdims=True) - about)
        grad_x = grad_x.reshape(input.shape)
    if output_mask[1]:
        grad_w = jnp.sum(grad * normed.reshape(grad.shape), (0, 2))
    if output_mask[2]:
        grad_b = jnp.sum(grad, (0, 2))
    return grad_x, grad_w, grad_b


def _channels(v: Any, x: Any) -> Any:
    return None if v is None else wide(v).reshape(1, -1, *(1,) * (x.ndim - 2))


def _affine(x: Any, mean: Any, invstd: Any, weight: Any, bias: Any) -> Any:
    out = (x - _channels(mean, x)) * _channels(invstd, x)
    out = out if weight is None else out * _channels(weight, x)
    return out if bias is None else out + _channels(bias, x)


@lowers("_native_batch_norm_legit_functional")
def batch_norm_functional(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any, Any, Any]:
    """The input normalised over all dims but its channels, saved values, and new running stats."""
    x = wide(input)
    if not training:
        mean, invstd = wide(running_mean), 1 / jnp.sqrt(wide(running_var) + eps)
        nothing = jnp.zeros(0, x.dtype)
        out = _affine(x, mean, invstd, weight, bias)
        return out, nothing, nothing, running_mean, running_var
    dims = (0, *range(2, x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    mean = jnp.mean(x, dims)
    if is_for_tpu() and input.dtype == jnp.bfloat16 and running_mean is not None:
        # One pass for both, which libtpu makes where it makes the input. The running mean, which is
        # known before, is near the mean, and a TPU adds up the elements of a tile side by side. So
        # the difference loses less in float32 than the input has lost in bfloat16, whose rounding
        # has a variance of 2**-18 of the mean's square.
        about = jnp.mean(jnp.square(x - _channels(running_mean, x)), dims)
        variance = jnp.maximum(about - jnp.square(mean - wide(running_mean)), 0)
    else:
        variance = jnp.mean(jnp.square(x - _channels(mean, x)), dims)
    invstd = 1 / jnp.sqrt(variance + eps)
    if running_mean is not None:
        running_mean = momentum * mean + (1 - momentum) * wide(running_mean)
    if running_var is not None:
        unbiased = variance * (count / max(count - 1, 1))
        running_var = momentum * unbiased + (1 - momentum) * wide(running_var)
    return _affine(x, mean, invstd, weight, bias), mean, invstd, running_mean, running_var


@lowers("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(*operands: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Computes the functional form without the running stats, which torch changes in place."""
    return batch_norm_functional(*operands, **options)[:3]


@lowers("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    input: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """The input normalised by its own mean and variance."""
    return native_batch_norm(input, weight, bias, None, None, True, momentum, eps)


@lowers("_native_batch_norm_legit_no_training")
def batch_norm_no_training(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """The input normalised by the running stats."""
    return native_batch_norm(input, weight, bias, mean, var, False, momentum, eps)


@lowers("native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out: Any,
    input: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Any,
) -> tuple[Any, Any, Any]:
    """The gradients of input, weight and bias for which the mask asks."""
    grad, x = wide(grad_out), wide(input)
    dims = (0, *range(2, x.ndim))
    if train:
        mean, invstd = wide(save_mean), wide(save_invstd)
    else:
        mean, invstd = wide(running_mean), 1 / jnp.sqrt(wide(running_var) + eps)
    normed = (x - _channels(mean, x)) * _channels(invstd, x)
    sums, dots = jnp.sum(grad, dims), jnp.sum(grad * normed, dims)
    grad_x = None
    if output_mask[0]:
        grad_x = grad
        if train:
            count = math.prod(x.shape[d] for d in dims)
            grad_x = grad - (_channels(sums, x) + normed * _channels(dots, x)) / count
        grad_x = grad_x * _channels(invstd, x)
        grad_x = grad_x if weight is None else grad_x * _channels(weight, x)
    return grad_x, dots if output_mask[1] else None, sums if output_mask[2] else None


@lowers("_softmax")
def softmax(self: Any, dim: int, half_to_float: bool = False) -> Any:
    """The exponentials along a dim, divided by their sum."""
    return jax.nn.softmax(wide(self), dim) if self.ndim else jnp.ones_like(wide(self))


@lowers("_log_softmax")
def log_softmax(self: Any, dim: int, half_to_float: bool = False) -> Any:
    """The logarithm of `softmax`."""
    return jax.nn.log_softmax(wide(self), dim) if self.ndim else jnp.zeros_like(wide(self))


@lowers("_softmax_backward_data")
def softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """The gradient of `softmax`, given its output."""
    grad, out = wide(grad_output), wide(output)
    product = grad * out
    dims = dim if out.ndim else ()
    return product - out * jnp.sum(product, dims, keepdims=True)


@lowers("_log_softmax_backward_data")
def log_softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """The gradient of `log_softmax`, given its output."""
    grad, out = wide(grad_output), wide(output)
    dims = dim if out.ndim else ()
    return grad - jnp.exp(out) * jnp.sum(grad, dims, keepdims=True)


@lowers("_weight_norm_interface_backward")
def weight_norm_backward(
    grad_w: Any, saved_v: Any, saved_g: Any, saved_norms: Any, dim: int
) -> tuple[Any, Any]:
    """The gradients of v and g, for a weight v * g / norm(v) with a norm per index of dim."""
    grad, v, g, norms = wide(grad_w), wide(saved_v), wide(saved_g), wide(saved_norms)
    along = jnp.sum(grad * v, tuple(d for d in range(v.ndim) if d != dim), keepdims=True) / norms
    return g / norms * (grad - v * along / norms), along
