"""Comparisons, logic and bits, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax.ops._dtypes import cast, result_type
from spmdzero.backend.jax.ops._table import lowers


def _compared(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes `function` compare in the operands' common dtype, to which numbers are rounded."""

    def lowered(self: Any, other: Any) -> Any:
        dtype = result_type(self, other)
        return function(cast(self, dtype), cast(other, dtype))

    return lowered


for _name, _function in {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}.items():
    lowers(f"{_name}.Tensor", f"{_name}.Scalar")(_compared(_function))

for _name, _function in {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
}.items():
    lowers(f"{_name}.Tensor", f"{_name}.Scalar", f"{_name}.Scalar_Tensor")(_compared(_function))

for _name, _function, _short in (
    ("bitwise_left_shift", jnp.left_shift, "__lshift__"),
    ("bitwise_right_shift", jnp.right_shift, "__rshift__"),
):
    lowers(
        f"{_name}.Tensor",
        f"{_name}.Tensor_Scalar",
        f"{_name}.Scalar_Tensor",
        f"{_short}.Tensor",
        f"{_short}.Scalar",
    )(_compared(_function))


def _of_truths(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(*(x.astype(bool) for x in operands))


for _name, _function in {
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "logical_not": jnp.logical_not,
}.items():
    lowers(_name)(_of_truths(_function))


@lowers("bitwise_not")
def bitwise_not(self: Any) -> Any:
    """All bits inverted."""
    return jnp.bitwise_not(self)
