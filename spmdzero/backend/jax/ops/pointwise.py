"""Arithmetic of two or three operands, element by element."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import jax.scipy.special as jsp
import torch
from jax import lax

from spmdzero.backend.jax.axes._slice import sharing_axes
from spmdzero.backend.jax.ops._dtypes import (
    cast,
    common,
    common_float,
    dtype_of,
    is_inexact,
    result_type,
)
from spmdzero.backend.jax.ops._table import UnsupportedError, lowers


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


@lowers("add.Tensor", "add.Scalar")
def add(self: Any, other: Any, alpha: Any = 1) -> Any:
    """self + alpha * other."""
    if alpha == 1 and sharing_axes() and _dtype(self) == _dtype(other) is not None:
        # One sum is rounded the same in either dtype, and XLA adds two sums of devices' parts up
        # before they cross the wire only where no cast stands between.
        return self + other
    a, b = common(self, other)
    return a + b if alpha == 1 else a + b * cast(alpha, dtype_of(a))


@lowers("sub.Tensor", "sub.Scalar")
def sub(self: Any, other: Any, alpha: Any = 1) -> Any:
    """self - alpha * other."""
    if torch.bool in (dtype_of(self), dtype_of(other)):
        raise UnsupportedError("torch subtracts no bools", "Invert a mask with ~, or use ^")
    a, b = common(self, other)
    return a - b if alpha == 1 else a - b * cast(alpha, dtype_of(a))


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(self: Any, other: Any, alpha: Any = 1) -> Any:
    """other - alpha * self."""
    return sub(other, self, alpha)


@lowers("mul.Tensor", "mul.Scalar")
def mul(self: Any, other: Any) -> Any:
    """self * other."""
    a, b = common(self, other)
    return a * b


def floor_div(a: Any, b: Any) -> Any:
    """The quotient of operands of one dtype, rounded down as torch does."""
    if not is_inexact(dtype_of(a)):
        return jnp.floor_divide(a, b)
    mod = lax.rem(a, b)
    div = (a - mod) / b
    div = jnp.where((mod != 0) & ((b < 0) != (mod < 0)), div - 1, div)
    floor = jnp.floor(div)
    floor = jnp.where(div - floor > 0.5, floor + 1, floor)
    floor = jnp.where(div == 0, jnp.copysign(jnp.zeros_like(div), a / b), floor)
    return jnp.where(b == 0, a / b, floor)


@lowers("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def div(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """self / other: a float for integers, unless a rounding mode is given."""
    if rounding_mode is None:
        a, b = common_float(self, other)
        return a / b
    a, b = jnp.broadcast_arrays(*common(self, other))
    if rounding_mode == "floor":
        return floor_div(a, b)
    return jnp.trunc(a / b) if is_inexact(dtype_of(a)) else lax.div(a, b)


@lowers("floor_divide", "floor_divide.Scalar")
def floor_divide(self: Any, other: Any) -> Any:
    """self / other rounded down."""
    return div(self, other, "floor")


@lowers("fmod.Tensor", "fmod.Scalar")
def fmod(self: Any, other: Any) -> Any:
    """The remainder with the dividend's sign."""
    return lax.rem(*jnp.broadcast_arrays(*common(self, other)))


@lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(self: Any, other: Any) -> Any:
    """The remainder with the divisor's sign."""
    return jnp.remainder(*common(self, other))


@lowers("pow.Tensor_Tensor", "pow.Scalar")
def power(self: Any, exponent: Any) -> Any:
    """self ** exponent."""
    a, b = common(self, exponent)
    if is_inexact(dtype_of(a)):
        return jnp.power(a, b)
    if not jnp.issubdtype(a.dtype, jnp.signedinteger):
        return jnp.power(a, b)
    # An integer's negative powers are fractions, of which torch keeps the integer part.
    fraction = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(b % 2 == 0, 1, -1), 0))
    return jnp.where(b < 0, fraction.astype(a.dtype), jnp.power(a, jnp.maximum(b, 0)))


@lowers("pow.Tensor_Scalar")
def power_of_number(self: Any, exponent: Any) -> Any:
    """self ** exponent; the exponents that torch's kernel multiplies out are multiplied out."""
    dtype = result_type(self, exponent)
    if not is_inexact(dtype) or dtype.is_complex:
        return power(self, exponent)
    (a,) = common(cast(self, dtype))
    if exponent == 0.5:
        return jnp.sqrt(a)
    if exponent == -0.5:
        return 1 / jnp.sqrt(a)
    if exponent in (2, 3, -1, -2):
        return lax.integer_pow(a, int(exponent))
    return jnp.power(a, cast(exponent, dtype_of(a)))


@lowers("addcmul")
def addcmul(self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    """self + value * tensor1 * tensor2."""
    a, b, c = common(self, tensor1, tensor2)
    return a + (b * c if value == 1 else cast(value, dtype_of(a)) * b * c)


@lowers("addcdiv")
def addcdiv(self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    """self + value * tensor1 / tensor2."""
    a, b, c = common(self, tensor1, tensor2)
    return a + (b / c if value == 1 else cast(value, dtype_of(a)) * b / c)


@lowers("lerp.Scalar", "lerp.Tensor")
def lerp(self: Any, end: Any, weight: Any) -> Any:
    """The value between self and end at this weight, computed from the nearer end."""
    a, b, w = common(self, end, weight)
    near = abs(w) < 0.5
    return jnp.where(near, a + w * (b - a), b - (b - a) * (1 - w))


def _of_common(function: Any, *names: str) -> None:
    """Enters a function of two operands in their common dtype."""

    @lowers(*names)
    def lowered(self: Any, other: Any) -> Any:
        return function(*common(self, other))


def _of_floats(function: Any, *names: str) -> None:
    """Enters a function of two operands in their common floating dtype."""

    @lowers(*names)
    def lowered(self: Any, other: Any) -> Any:
        return function(*jnp.broadcast_arrays(*common_float(self, other)))


def _fmax(a: Any, b: Any) -> Any:
    return jnp.fmax(a, b) if is_inexact(dtype_of(a)) else jnp.maximum(a, b)


def _fmin(a: Any, b: Any) -> Any:
    return jnp.fmin(a, b) if is_inexact(dtype_of(a)) else jnp.minimum(a, b)


def _xlogy(a: Any, b: Any) -> Any:
    return jnp.where(jnp.isnan(b), b, jnp.where(a == 0, 0, a * jnp.log(b)))


def _logaddexp2(a: Any, b: Any) -> Any:
    if not jnp.iscomplexobj(a):
        return jnp.logaddexp2(a, b)
    two = jnp.log(jnp.asarray(2, a.dtype))
    return jnp.logaddexp(a * two, b * two) / two


_of_common(jnp.maximum, "maximum")
_of_common(jnp.minimum, "minimum")
_of_common(_fmax, "fmax")
_of_common(_fmin, "fmin")
_of_common(jnp.gcd, "gcd")
_of_common(jnp.lcm, "lcm")
_of_floats(jnp.arctan2, "atan2")
_of_floats(jnp.copysign, "copysign.Tensor", "copysign.Scalar")
_of_floats(jnp.hypot, "hypot")
_of_floats(jnp.logaddexp, "logaddexp")
_of_floats(_logaddexp2, "logaddexp2")
_of_floats(jsp.gammainc, "igamma")
_of_floats(jsp.gammaincc, "igammac")
_of_floats(jsp.zeta, "special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar")
_of_floats(_xlogy, "xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")


@lowers("nextafter")
def nextafter(self: Any, other: Any) -> Any:
    """The neighbour of self towards other, in the operands' own dtype."""
    dtype = result_type(self, other)
    return jnp.nextafter(cast(self, dtype), cast(other, dtype))


@lowers("clamp", "clamp.Tensor")
def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """self limited to the bounds, either of which may be None; NaN in any operand stays."""
    bounds = [x for x in (min, max) if x is not None]
    a, *rest = common(self, *bounds)
    if min is not None:
        a = jnp.maximum(a, rest.pop(0))
    return a if max is None else jnp.minimum(a, rest[0])


@lowers("clamp_min", "clamp_min.Tensor")
def clamp_min(self: Any, min: Any) -> Any:
    """The larger of self and the bound."""
    return clamp(self, min)


@lowers("clamp_max", "clamp_max.Tensor")
def clamp_max(self: Any, max: Any) -> Any:
    """The smaller of self and the bound."""
    return clamp(self, None, max)


@lowers("where.self")
def where(condition: Any, self: Any, other: Any) -> Any:
    """self where the condition holds, else other."""
    dtype = result_type(self, other)
    return jnp.where(condition.astype(bool), cast(self, dtype), cast(other, dtype))


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(self: Any, mask: Any, value: Any) -> Any:
    """The value where the mask holds, in self's dtype."""
    return jnp.where(mask.astype(bool), cast(value, dtype_of(self)), self)


@lowers("copy")
def copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """src with self's shape and dtype."""
    return jnp.broadcast_to(cast(src, dtype_of(self)), self.shape)


@lowers("fill.Scalar", "fill.Tensor")
def fill(self: Any, value: Any) -> Any:
    """The value in self's shape and dtype."""
    return jnp.broadcast_to(cast(value, dtype_of(self)), self.shape)


@lowers("zero")
def zero(self: Any) -> Any:
    """0 in self's shape and dtype."""
    return jnp.zeros_like(self)
