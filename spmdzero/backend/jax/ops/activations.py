"""Activations of neural networks and their backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp

from spmdzero.backend.jax.ops._dtypes import common, wide
from spmdzero.backend.jax.ops._table import lowers


@lowers("relu")
def relu(self: Any) -> Any:
    """self, with 0 in the place of negative numbers; NaN stays."""
    return jnp.maximum(self, jnp.zeros((), self.dtype))


@lowers("threshold_backward")
def threshold_backward(grad_output: Any, self: Any, threshold: float) -> Any:
    """The gradient where self is above the threshold."""
    return jnp.where(self <= threshold, 0, grad_output)


@lowers("sigmoid_backward")
def sigmoid_backward(grad_output: Any, output: Any) -> Any:
    """The gradient of a sigmoid of this output."""
    grad, out = common(grad_output, output)
    return grad * jnp.conj(out * (1 - out))


@lowers("tanh_backward")
def tanh_backward(grad_output: Any, output: Any) -> Any:
    """The gradient of a tanh of this output."""
    grad, out = common(grad_output, output)
    return grad * jnp.conj(1 - out * out)


@lowers("gelu")
def gelu(self: Any, approximate: str = "none") -> Any:
    """x times the normal distribution's mass below x, or the approximation by tanh."""
    x = wide(self)
    if approximate == "tanh":
        return jax.nn.gelu(x, approximate=True)
    return x * 0.5 * (1 + jsp.erf(x * 0.5**0.5))


@lowers("silu")
def silu(self: Any) -> Any:
    """x times its sigmoid."""
    x = wide(self)
    return x / (1 + jnp.exp(-x))


@lowers("elu")
def elu(self: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """x where it is positive, else an exponential that tends to -alpha."""
    x = wide(self)
    below = jnp.expm1(jnp.minimum(x, 0) * input_scale) * alpha
    return jnp.where(x > 0, x, below) * scale


@lowers("leaky_relu")
def leaky_relu(self: Any, negative_slope: float = 0.01) -> Any:
    """x, times the slope where it is negative."""
    x = wide(self)
    return jnp.where(x > 0, x, x * negative_slope)


@lowers("hardtanh")
def hardtanh(self: Any, min_val: float = -1, max_val: float = 1) -> Any:
    """x limited to the two values."""
    return jnp.clip(self, jnp.asarray(min_val, self.dtype), jnp.asarray(max_val, self.dtype))


@lowers("softplus")
def softplus(self: Any, beta: float = 1, threshold: float = 20) -> Any:
    """A smooth relu, and x itself beyond the threshold."""
    x = wide(self)
    inner = jnp.where(x * beta > threshold, 0, x * beta)
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(inner)) / beta)


@lowers("log_sigmoid_forward")
def log_sigmoid_forward(self: Any) -> tuple[Any, Any]:
    """The sigmoid's logarithm, and the buffer that torch's CPU kernel keeps for backward."""
    x = wide(self)
    buffer = jnp.exp(-jnp.abs(x))
    return jnp.minimum(x, 0) - jnp.log1p(buffer), buffer


@lowers("log_sigmoid_backward")
def log_sigmoid_backward(grad_output: Any, self: Any, buffer: Any) -> Any:
    """The gradient of the sigmoid's logarithm; doesn't read the buffer."""
    grad, x = common(grad_output, self)
    return grad * jax.nn.sigmoid(-x)


@lowers("_prelu_kernel")
def prelu(self: Any, weight: Any) -> Any:
    """x where it is positive, else x times the weight."""
    x, w = common(self, weight)
    return jnp.where(x > 0, x, w * x)


@lowers("_prelu_kernel_backward")
def prelu_backward(grad_output: Any, self: Any, weight: Any) -> tuple[Any, Any]:
    """The gradients of x and of the weight, the latter not summed yet."""
    grad, x, w = common(grad_output, self, weight)
    return jnp.where(x > 0, grad, w * grad), jnp.where(x > 0, 0, x * grad)


@lowers("gelu_backward")
def gelu_backward(grad_output: Any, self: Any, approximate: str = "none") -> Any:
    """The gradient of `gelu`."""
    grad, x = common(grad_output, self)
    return _pulled(lambda x: gelu(x, approximate), x, grad)


@lowers("silu_backward")
def silu_backward(grad_output: Any, self: Any) -> Any:
    """The gradient of `silu`."""
    grad, x = common(grad_output, self)
    s = jax.nn.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@lowers("softplus_backward")
def softplus_backward(grad_output: Any, self: Any, beta: float, threshold: float) -> Any:
    """The gradient of `softplus`."""
    grad, x = common(grad_output, self)
    return jnp.where(x * beta > threshold, grad, grad * jax.nn.sigmoid(x * beta))


@lowers("hardshrink_backward", "softshrink_backward")
def shrink_backward(grad_out: Any, self: Any, lambd: float) -> Any:
    """The gradient where self lies outside of [-lambd, lambd]."""
    return jnp.where((self >= -lambd) & (self <= lambd), 0, grad_out)


def _pulled(function: Callable[[Any], Any], x: Any, grad: Any) -> Any:
    _, pull = jax.vjp(function, x)
    return pull(grad)[0]
