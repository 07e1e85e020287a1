"""Convolutions of any number of dims, plain and transposed, and their backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdzero.backend.jax.ops._dtypes import dtype_of, jax_dtype, math_dtype, wide
from spmdzero.backend.jax.ops._shapes import several
from spmdzero.backend.jax.ops._table import lowers


def _numbers(dims: int) -> Any:
    spec = tuple(range(dims + 2))
    return lax.ConvDimensionNumbers(spec, spec, spec)


def _convolved(
    x: Any, weight: Any, stride: Any, pads: Any, spread: Any, dilation: Any, groups: Any
):
    return lax.conv_general_dilated(
        x,
        weight,
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=_numbers(x.ndim - 2),
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jax_dtype(math_dtype(dtype_of(x))),
    )


@lowers("convolution")
def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """The convolution; with `transposed` the gradient of one with respect to its input."""
    dims = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        several(v, dims) for v in (stride, padding, dilation, output_padding)
    )
    batched = input.ndim == weight.ndim
    x, ones = (input if batched else input[None]), (1,) * dims
    if not transposed:
        pads = [(p, p) for p in padding]
        out = _convolved(x, weight, stride, pads, ones, dilation, groups)
    else:
        # The weight has the shape (in, out / groups): exchange the two within each group.
        split = weight.reshape(groups, -1, *weight.shape[1:])
        turned = jnp.swapaxes(split, 1, 2).reshape(-1, *split.shape[1:2], *weight.shape[2:])
        turned = jnp.flip(turned, tuple(range(2, dims + 2)))
        pads = []
        for k, p, d, extra in zip(weight.shape[2:], padding, dilation, output_padding, strict=True):
            full = d * (k - 1)
            pads.append((full - p, full - p + extra))
        out = _convolved(x, turned, ones, pads, stride, dilation, groups)
    if bias is not None:
        out = out + bias.astype(out.dtype).reshape(-1, *ones)
    return out if batched else out[0]


@lowers("convolution_backward")
def convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
) -> tuple[Any, Any, Any]:
    """The gradients of input, weight and bias for which the mask asks."""

    def forward(x: Any, w: Any) -> Any:
        return convolution(
            x, w, None, stride, padding, dilation, transposed, output_padding, groups
        )

    grad, x, w = wide(grad_output), wide(input), wide(weight)
    grad_x = grad_w = grad_b = None
    if output_mask[0]:
        grad_x = jax.vjp(lambda x: forward(x, w), x)[1](grad)[0]
    if output_mask[1]:
        grad_w = jax.vjp(lambda w: forward(x, w), w)[1](grad)[0]
    if output_mask[2]:
        dims = tuple(range(2, grad.ndim))
        grad_b = jnp.sum(grad, (0, *dims))
    return grad_x, grad_w, grad_b
