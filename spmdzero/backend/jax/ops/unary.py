"""Functions of one operand, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import lax

from spmdzero.backend.jax.ops._dtypes import (
    cast,
    dtype_of,
    is_inexact,
    jax_dtype,
    wide,
    wide_float,
)
from spmdzero.backend.jax.ops._table import lowers


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + jnp.exp(-x)) if jnp.iscomplexobj(x) else jax.nn.sigmoid(x)


def _digamma(x: Any) -> Any:
    # At the poles torch returns -inf or inf for 0, by its sign, and NaN for the negative integers.
    at_zero = jnp.copysign(jnp.full_like(x, jnp.inf), -x)
    return jnp.where(x == 0, at_zero, jsp.digamma(x))


# Integers become floats; half precision is computed in float32.
_FLOATING: dict[str, Callable[[Any], Any]] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "digamma": _digamma,
    "erf": jsp.erf,
    "erfc": jsp.erfc,
    "erfinv": jsp.erfinv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "i0": jsp.i0,
    "lgamma": jsp.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / jnp.sqrt(x) if jnp.iscomplexobj(x) else lax.rsqrt(x),
    "sigmoid": _sigmoid,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "special_i0e": jsp.i0e,
    "special_i1": jsp.i1,
    "special_i1e": jsp.i1e,
    "special_log_ndtr": jsp.log_ndtr,
    "special_ndtri": jsp.ndtri,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}


def _floating(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(wide_float(self))


for _name, _function in _FLOATING.items():
    lowers(_name)(_floating(_function))


def _of_reals(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a rounding function to return integers as they are."""
    return lambda self: function(self) if is_inexact(dtype_of(self)) else self


for _name, _function in {"ceil": jnp.ceil, "floor": jnp.floor, "trunc": jnp.trunc}.items():
    lowers(_name)(_of_reals(_function))


@lowers("round", "round.decimals")
def round_(self: Any, decimals: int = 0) -> Any:
    """self rounded to the nearest, halves to even."""
    if not is_inexact(dtype_of(self)):
        return self
    x = wide(self)
    if decimals == 0:
        return jnp.round(x)
    scale = 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale


@lowers("abs")
def abs_(self: Any) -> Any:
    """The magnitude."""
    return jnp.abs(self)


@lowers("neg")
def neg(self: Any) -> Any:
    """self with the opposite sign."""
    return jnp.negative(self)


@lowers("alias", "alias_copy", "detach", "detach_copy", "lift", "lift_fresh", "lift_fresh_copy")
def same(self: Any, **_: Any) -> Any:
    """self."""
    return self


# An array has no lazy sign: a flag on a view in torch is a negation here.
lowers("_neg_view", "_neg_view_copy")(neg)


@lowers("clone")
def clone(self: Any, memory_format: Any = None) -> Any:
    """self: arrays can't change, so that no copy is needed."""
    return self


@lowers("sign")
def sign(self: Any) -> Any:
    """-1, 0 or 1; 0 for NaN."""
    if self.dtype == bool:
        return self
    return (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)


@lowers("sgn")
def sgn(self: Any) -> Any:
    """The sign, or the direction of a complex number."""
    if not jnp.iscomplexobj(self):
        return sign(self)
    size = jnp.abs(self)
    return jnp.where(size == 0, 0, self / jnp.where(size == 0, 1, size))


@lowers("signbit")
def signbit(self: Any) -> Any:
    """Whether the sign is minus, also of -0.0."""
    return jnp.signbit(self) if is_inexact(dtype_of(self)) else self < 0


@lowers("isnan")
def isnan(self: Any) -> Any:
    """Whether each element is NaN."""
    return jnp.isnan(self)


@lowers("isinf")
def isinf(self: Any) -> Any:
    """Whether each element is infinite."""
    return jnp.isinf(self)


@lowers("nan_to_num")
def nan_to_num(
    self: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    """self with finite numbers in the place of NaN and the infinities."""
    if not is_inexact(dtype_of(self)):
        return self
    return jnp.nan_to_num(self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


def _cotangents(n: int, x: Any) -> Any:
    """Pi times the n-th derivative of cot(pi x), as a polynomial of the cotangent."""
    derivative = np.polynomial.Polynomial([0.0, np.pi])
    for _ in range(n):
        derivative = derivative.deriv() * np.polynomial.Polynomial([-np.pi, 0.0, -np.pi])
    # The cotangent is 0 at a half to the last bit, where the terms are large, and exact near the
    # poles.
    near = x - jnp.round(x)
    rest = jnp.abs(near)
    cotangent = jnp.sign(near) * jnp.sin(jnp.pi * (0.5 - rest)) / jnp.sin(jnp.pi * rest)
    return jnp.polyval(jnp.asarray(derivative.coef[::-1], x.dtype), cotangent)


@lowers("polygamma")
def polygamma(n: int, self: Any) -> Any:
    """The n-th derivative of digamma."""
    x = wide_float(self)
    if n == 0:
        return _digamma(x)
    # JAX sums ten terms, which is wrong below -8. There the reflection formula is used (DLMF
    # 5.15.6), which rounds more where its two terms cancel.
    far = x < 0
    value = jsp.polygamma(n, jnp.where(far, 1 - x, x))
    value = jnp.where(far, (-1) ** n * value - _cotangents(n, x), value)
    if n == 1:
        value = jnp.where(x == jnp.inf, 0, value)
    # For even n JAX returns NaN at the poles.
    pole = (x <= 0) & (x == jnp.floor(x))
    return jnp.where(pole, jnp.inf if n % 2 else -jnp.inf, value)


@lowers("frexp.Tensor")
def frexp(self: Any) -> tuple[Any, Any]:
    """Mantissa and exponent."""
    mantissa, exponent = jnp.frexp(wide(self))
    return mantissa, exponent.astype(jnp.int32)


@lowers("real")
def real(self: Any) -> Any:
    """The real part."""
    return jnp.real(self)


@lowers("imag")
def imag(self: Any) -> Any:
    """The imaginary part."""
    return jnp.imag(self)


@lowers("angle")
def angle(self: Any) -> Any:
    """The angle in the complex plane: pi for a negative real number, NaN for NaN."""
    x = wide_float(self)
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0).astype(x.dtype))


@lowers("_conj", "_conj_physical", "conj_physical")
def conj(self: Any) -> Any:
    """The complex conjugate."""
    return jnp.conj(self)


@lowers("complex")
def complex_(real: Any, imag: Any) -> Any:
    """A complex array from its parts."""
    return lax.complex(*jnp.broadcast_arrays(wide(real), wide(imag)))


@lowers("polar")
def polar(abs: Any, angle: Any) -> Any:
    """A complex array from lengths and angles."""
    return complex_(abs * jnp.cos(angle), abs * jnp.sin(angle))


@lowers("view_as_real", "view_as_real_copy")
def view_as_real(self: Any) -> Any:
    """The real and imaginary parts in a last dim of two."""
    return jnp.stack([jnp.real(self), jnp.imag(self)], axis=-1)


@lowers("view_as_complex", "view_as_complex_copy")
def view_as_complex(self: Any) -> Any:
    """Complex numbers whose parts are in the last dim of two."""
    return complex_(self[..., 0], self[..., 1])


@lowers("_to_copy", "prims.convert_element_type")
def to_copy(self: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
    """self in another dtype; device, layout and the rest have no meaning here."""
    return cast(self, dtype)


@lowers("view.dtype")
def view_dtype(self: Any, dtype: Any) -> Any:
    """The same bytes as another dtype."""
    return self.view(jax_dtype(dtype))
