"""Operations of tensors with few bits: their largest size, their cast by a scale, their product.

They are torch operations of our own, so that whatever watches operations knows them, and a backend
lowers them. Here is what they compute on a CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch

_library = torch.library.Library("spmdzero", "DEF")
_library.define("absmax(Tensor x, int[] dims) -> Tensor")
_library.define("power_of_two(Tensor x) -> Tensor")
_library.define("quantized(Tensor x, Tensor scale, ScalarType dtype) -> Tensor")
_library.define(
    "scaled_product(Tensor a, Tensor b, int[] along_a, int[] along_b, Tensor scale_a, "
    "Tensor scale_b, ScalarType dtype) -> Tensor"
)
_ops: Any = torch.ops.spmdzero
ABSMAX = _ops.absmax.default
QUANTIZED = _ops.quantized.default
SCALED_PRODUCT = _ops.scaled_product.default


LEAST = 1e-30
"""Divides a row of zeros, whose largest size has no reciprocal."""


def largest(dtype: torch.dtype) -> float:
    """The largest number of a dtype of 8 bits; of int8 127, so that signs are alike."""
    return 127.0 if dtype is torch.int8 else torch.finfo(dtype).max


def absmax(x: torch.Tensor, dims: Sequence[int] = ()) -> torch.Tensor:
    """The largest absolute value, fp32.

    Args:
        x: floating.
        dims: over which it is taken, which have length 1 then; empty for all, which leaves no dim.

    Returns NaN where there is one, and 0 of no value at all.
    """
    made: torch.Tensor = ABSMAX(x, list(dims))
    return made


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The largest powers of two that are no larger than the positive numbers of x, fp32.

    It is exact, unlike `2 ** log2(x).floor()` on many compilers.
    """
    made: torch.Tensor = _ops.power_of_two.default(x)
    return made


def quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x * scale` in a dtype of 8 bits; what is beyond its largest number becomes that.

    Args:
        x: floating; it is multiplied in fp32.
        scale: fp32, of a shape that broadcasts to that of x.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8. All round to the nearest, ties
            to even.

    Returns `[*x.shape]`. NaN stays NaN in fp8; int8 has none.
    """
    made: torch.Tensor = QUANTIZED(x, scale, dtype)
    return made


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    along: tuple[Sequence[int], Sequence[int]],
    scales: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product of two tensors of 8 bits, times both scales.

    Args:
        a, b: both fp8, of either kind, or both int8.
        along: the dims of a, and of b, that are multiplied and added up.
        scales: fp32, of shapes that broadcast to that of the result.
        dtype: of the result. Products of fp8 are added up in fp32, those of int8 exactly.

    Returns the dims of a that are left, then those of b.
    """
    made: torch.Tensor = SCALED_PRODUCT(a, b, list(along[0]), list(along[1]), *scales, dtype)
    return made


def _absmax(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    if x.numel() == 0:
        return x.sum(dims, keepdim=True).float() if dims else x.new_zeros((), dtype=torch.float32)
    size = x.abs().amax(dims, keepdim=True) if dims else x.abs().amax()
    return size.float()


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    power = torch.ldexp(torch.ones_like(x), exponent - 1)
    return torch.where(mantissa.isfinite() & (x > 0), power, x)


def _quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = largest(dtype)
    scaled = x.float() * scale
    if dtype is torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-most, most).to(dtype)


def _scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    along_a: list[int],
    along_b: list[int],
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    # Sums of products of int8 are exact in fp64.
    wide = torch.float64 if a.dtype is torch.int8 else torch.float32
    made = torch.tensordot(a.to(wide), b.to(wide), (along_a, along_b)).float()
    return (made * scale_a * scale_b).to(dtype)


for _name, _function in (
    ("absmax", _absmax),
    ("power_of_two", _power_of_two),
    ("quantized", _quantized),
    ("scaled_product", _scaled_product),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
