"""Matrix products: float32 is multiplied in float32, and half precision accumulated in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from spmdzero.backend.jax._versions import is_for_tpu
from spmdzero.backend.jax.axes._slice import sharing_axes
from spmdzero.backend.jax.ops._dtypes import (
    cast,
    dtype_of,
    is_inexact,
    jax_dtype,
    math_dtype,
)
from spmdzero.backend.jax.ops._table import lowers
from spmdzero.backend.jax.ops.activations import gelu, relu

_in_loop: ContextVar[bool] = ContextVar("in_loop", default=False)


@contextlib.contextmanager
def in_loop() -> Iterator[None]:
    """Context in which the body of a loop over blocks is traced."""
    before = _in_loop.set(True)
    try:
        yield
    finally:
        _in_loop.reset(before)


def product(
    a: Any,
    b: Any,
    contract: tuple[Any, Any],
    batch: tuple[Any, Any] = ((), ()),
    *,
    wide: bool = False,
) -> Any:
    """`dot_general` of operands of one dtype, in the dtype in which torch's kernels compute.

    Args:
        wide: whether devices that share a replica add their parts up in that dtype on TPUs too.
    """
    dtype = jax_dtype(math_dtype(dtype_of(a)))
    if is_for_tpu():
        if sharing_axes() and not wide:
            # A chip adds in fp32 all the same. What devices of the axis tensor then add up of
            # their parts crosses the wire in this dtype.
            dtype = a.dtype
    elif jax.default_backend() == "cpu":
        # XLA's CPU kernels refuse some products of half precision with a wider result. A product of
        # two such numbers is exact in fp32, so that the result is the same.
        a, b = a.astype(dtype), b.astype(dtype)
    return lax.dot_general(
        a,
        b,
        (contract, batch),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


@lowers("mm", "mm.dtype")
def mm(self: Any, mat2: Any, out_dtype: Any = None) -> Any:
    """The product of two matrices."""
    made = product(self, mat2, ((1,), (0,)))
    if out_dtype is not None or not _is_in_loop_for_tpu():
        return made
    made = _by_rows(made.astype(self.dtype))
    # libtpu widens what is widened later before it writes it: twice the bytes. Where a result is
    # wider than the summed dim, that costs more than to widen it in another pass.
    return lax.optimization_barrier(made) if made.shape[1] > self.shape[1] else made


def _is_in_loop_for_tpu() -> bool:
    return _in_loop.get() and is_for_tpu() and not sharing_axes()


def _by_rows(made: Any) -> Any:
    """A matrix that libtpu keeps row by row in a loop over blocks.

    Left to itself, libtpu 0.0.50 has four activations of a large block's backward column by column
    there, and copies each to rows: a tenth of a step of Llama 3.1 8B.
    """
    return with_layout_constraint(made, Layout(major_to_minor=(0, 1)))


@lowers("bmm", "bmm.dtype")
def bmm(self: Any, mat2: Any, out_dtype: Any = None) -> Any:
    """The products of two batches of matrices."""
    return product(self, mat2, ((2,), (1,)), ((0,), (0,)))


@lowers("mv")
def mv(self: Any, vec: Any) -> Any:
    """The product of a matrix and a vector."""
    return product(self, vec, ((1,), (0,)))


@lowers("dot")
def dot(self: Any, tensor: Any) -> Any:
    """The product of two vectors."""
    return product(self, tensor, ((0,), (0,)))


@lowers("vdot")
def vdot(self: Any, other: Any) -> Any:
    """The product of two vectors, the first conjugated."""
    return dot(jnp.conj(self), other)


def _plus(self: Any, out: Any, beta: Any, alpha: Any) -> Any:
    """beta * self + alpha * out, not rounded yet; self is not read if beta is 0."""
    if not is_inexact(dtype_of(out)):
        beta, alpha = int(beta), int(alpha)
    out = out if alpha == 1 else out * cast(alpha, dtype_of(out))
    if beta == 0:
        return out
    self = self.astype(out.dtype)
    return out + (self if beta == 1 else self * cast(beta, dtype_of(out)))


@lowers("addmm")
def addmm(self: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * self + alpha * (mat1 @ mat2)."""
    made = product(mat1, mat2, ((1,), (0,)))
    return _plus(self, _by_rows(made) if _is_in_loop_for_tpu() else made, beta, alpha)


@lowers("baddbmm")
def baddbmm(self: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * self + alpha * (batch1 @ batch2)."""
    return _plus(self, bmm(batch1, batch2), beta, alpha)


@lowers("addbmm")
def addbmm(self: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * self + alpha times the sum of the batches' products."""
    return _plus(self, product(batch1, batch2, ((0, 2), (0, 1))), beta, alpha)


@lowers("addmv")
def addmv(self: Any, mat: Any, vec: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * self + alpha * (mat @ vec)."""
    return _plus(self, mv(mat, vec), beta, alpha)


@lowers("_addmm_activation")
def addmm_activation(
    self: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Any:
    """The activation of the result of `addmm`."""
    out = addmm(self, mat1, mat2, beta, alpha)
    return gelu(out, "tanh") if use_gelu else relu(out)


@lowers("linear")
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """input @ weight.T + bias."""
    out = product(input, weight, ((input.ndim - 1,), (weight.ndim - 1,)))
    return out if bias is None else out + bias.astype(out.dtype)


@lowers("_grouped_mm")
def grouped_mm(
    self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """The products of groups of rows with a matrix each, as of tokens sorted by experts.

    `offs` has the end of each group: in the rows of self for ``[rows, k]`` and ``[groups, k, n]``;
    in the summed dim for ``[m, k]`` and ``[k, n]``, where each group has its own product; or in
    the columns of mat2 for ``[groups, m, k]`` and ``[k, columns]``. Rows after the last group are
    0.
    """
    if self.ndim == 3 and mat2.ndim == 3:
        return bmm(self, mat2)
    if self.ndim == 3:
        return grouped_mm(mat2.T, jnp.swapaxes(self, 1, 2), offs).T
    wide = jax_dtype(math_dtype(dtype_of(self)))
    if not is_for_tpu() and jax.default_backend() == "cpu":
        # See `product`.
        self, mat2 = self.astype(wide), mat2.astype(wide)
    # libtpu refuses more passes of 16-bit numbers, of which one is exact.
    precise = not is_for_tpu() or self.dtype.itemsize > 2
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    if mat2.ndim == 3:
        dims = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    else:
        # With the rows first: libtpu multiplies all of them for each group where they are second.
        self = self.T
        dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(
        self,
        mat2,
        sizes,
        dims,
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=wide,
    )
