"""Decompositions and solutions of linear systems, by the LAPACK functions that JAX has."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import lax

from spmdzero.backend.jax._versions import solve_turns_its_matrix
from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import UnsupportedError, lowers


def exact(function: Any) -> Any:
    """Wraps `function` to refuse half precision, which LAPACK doesn't have."""

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            if hasattr(x, "dtype") and x.dtype.itemsize < 4:
                raise UnsupportedError(
                    f"there is none for {x.dtype}", "Cast to torch.float32 first: x.float()"
                )
        return function(*args, **kwargs)

    return computed


def _adjoint(a: Any) -> Any:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def _turned(a: Any) -> Any:
    """The matrix that torch factorizes for a contiguous real one: its transpose, for LAPACK."""
    return a if jnp.iscomplexobj(a) else jnp.swapaxes(a, -1, -2)


def _info(factor: Any) -> Any:
    """LAPACK's info: 0, or the number of the first zero on the diagonal."""
    zero = jnp.diagonal(factor, axis1=-2, axis2=-1) == 0
    before = jnp.sum(jnp.cumprod(~zero, -1), -1)
    return jnp.where(jnp.any(zero, -1), before + 1, 0).astype(jnp.int32)


def _lu(a: Any) -> tuple[Any, Any, Any]:
    """The LU, torch's pivots, which count from 1, and the permutation."""
    lu, pivots, permutation = lax.linalg.lu(a)
    return lu, pivots.astype(jnp.int32) + 1, permutation


@lowers("linalg_cholesky_ex")
@exact
def cholesky_ex(self: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    """The Cholesky factor, and 0 or, if there is none, the matrix's size (LAPACK: the minor's)."""
    factor = cholesky(self, upper)
    failed = jnp.any(jnp.isnan(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
    return factor, jnp.where(failed, self.shape[-1], 0).astype(jnp.int32)


@lowers("cholesky")
@exact
def cholesky(self: Any, upper: bool = False) -> Any:
    """The Cholesky factor."""
    # torch reads only one triangle: the other need not mirror it.
    a = _adjoint(self) if upper else self
    lower = lax.linalg.cholesky(a, symmetrize_input=False)
    return _adjoint(lower) if upper else lower


@lowers("linalg_inv_ex")
@exact
def inv_ex(a: Any, *, check_errors: bool = False) -> tuple[Any, Any]:
    """The inverse."""
    return jnp.linalg.inv(a), _info(_lu(a)[0])


@lowers("_linalg_slogdet")
@exact
def slogdet(a: Any) -> tuple[Any, Any, Any, Any]:
    """The determinant's sign and logarithm, and the LU."""
    lu, pivots, _ = _lu(_turned(a))
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    size = jnp.abs(diagonal)
    sign = jnp.prod(diagonal / jnp.where(size == 0, 1, size), -1) * _parity(pivots, lu.dtype)
    return sign, jnp.sum(jnp.log(size), -1), lu, pivots


def _parity(pivots: Any, dtype: Any) -> Any:
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), -1)
    return jnp.where(swaps % 2 == 0, 1, -1).astype(dtype)


@lowers("_linalg_det")
@exact
def det(a: Any) -> tuple[Any, Any, Any]:
    """The determinant, and the LU."""
    lu, pivots, _ = _lu(_turned(a))
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    return jnp.prod(diagonal, -1) * _parity(pivots, lu.dtype), lu, pivots


@lowers("linalg_lu_factor_ex")
@exact
def lu_factor_ex(a: Any, *, pivot: bool = True, check_errors: bool = False) -> tuple[Any, Any, Any]:
    """The LU and its pivots."""
    if not pivot:
        raise UnsupportedError("JAX has no LU without pivots", "Leave out pivot=False")
    lu, pivots, _ = _lu(a)
    return lu, pivots, _info(lu)


def _lower(lu: Any, columns: int) -> Any:
    return jnp.tril(lu[..., :columns], -1) + jnp.eye(lu.shape[-2], columns, dtype=lu.dtype)


@lowers("linalg_lu")
@exact
def lu(a: Any, *, pivot: bool = True) -> tuple[Any, Any, Any]:
    """The permutation and the two factors."""
    if not pivot:
        raise UnsupportedError("JAX has no LU without pivots", "Leave out pivot=False")
    factors, _, permutation = _lu(a)
    k = min(a.shape[-2:])
    rows = permutation[..., None, :] == jnp.arange(a.shape[-2])[:, None]
    return rows.astype(a.dtype), _lower(factors, k), jnp.triu(factors[..., :k, :])


@lowers("lu_unpack")
def lu_unpack(
    lu_data: Any, lu_pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Any, Any, Any]:
    """The permutation and the two factors of an LU; empty unless asked for."""
    rows, none = lu_data.shape[-2], jnp.zeros((0,), lu_data.dtype)
    k = min(lu_data.shape[-2:])
    order = none
    if unpack_pivots:
        permutation = lax.linalg.lu_pivots_to_permutation(lu_pivots - 1, rows)
        order = permutation[..., None, :] == jnp.arange(rows)[:, None]
    if not unpack_data:
        return order.astype(lu_data.dtype), none, none
    return order.astype(lu_data.dtype), _lower(lu_data, k), jnp.triu(lu_data[..., :k, :])


@lowers("linalg_householder_product")
@exact
def householder_product(self: Any, tau: Any) -> Any:
    """The orthogonal matrix of these reflections."""
    return lax.linalg.householder_product(self, tau)


@lowers("linalg_eig")
@exact
def eig(self: Any) -> tuple[Any, Any]:
    """The eigenvalues and eigenvectors of a matrix without symmetry."""
    return tuple(jnp.linalg.eig(self))


def _triangular(
    a: Any, b: Any, *, left: bool, lower: bool, turn: bool = False, unit: bool = False
) -> Any:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return lax.linalg.triangular_solve(
        jnp.broadcast_to(a, batch + a.shape[-2:]),
        jnp.broadcast_to(b, batch + b.shape[-2:]),
        left_side=left,
        lower=lower,
        transpose_a=turn,
        conjugate_a=turn,
        unit_diagonal=unit,
    )


@lowers("linalg_solve_triangular")
@exact
def solve_triangular(
    self: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """The x that solves `self @ x = b` (`x @ self = b` if not `left`) for a triangular matrix."""
    return _triangular(self, b, left=left, lower=not upper, unit=unitriangular)


@lowers("triangular_solve")
@exact
def triangular_solve(
    self: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Any, Any]:
    """The x that solves `a @ x = self` for a triangular matrix, and that matrix."""
    matrix = jnp.swapaxes(a, -1, -2) if transpose else a
    lower = upper if transpose else not upper
    return _triangular(matrix, self, left=True, lower=lower, unit=unitriangular), a


@lowers("_linalg_solve_ex")
@exact
def solve_ex(
    a: Any, b: Any, *, left: bool = True, check_errors: bool = False
) -> tuple[Any, Any, Any, Any]:
    """The x that solves `a @ x = b` (`x @ a = b` if not `left`), and the LU."""
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b[..., None] if vector else b
    batch = jnp.broadcast_shapes(a.shape[:-2], right.shape[:-2])
    whole = jnp.broadcast_to(a, batch + a.shape[-2:])
    right = jnp.broadcast_to(right, batch + right.shape[-2:])
    if left:
        out = jnp.linalg.solve(whole, right)
    else:
        out = jnp.swapaxes(
            jnp.linalg.solve(jnp.swapaxes(whole, -1, -2), jnp.swapaxes(right, -1, -2)), -1, -2
        )
    factors, pivots, _ = _lu(_turned(a) if solve_turns_its_matrix() else a)
    return out[..., 0] if vector else out, factors, pivots, _info(factors)


@lowers("linalg_lu_solve")
@exact
def lu_solve(lu: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    """The x that solves a system with b, given the matrix's LU."""
    if not left:
        out = lu_solve(lu, pivots, _adjoint(b), adjoint=not adjoint)
        return _adjoint(out)
    size = lu.shape[-1]
    permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, size)
    batch = jnp.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    permutation = jnp.broadcast_to(permutation, (*batch, size))
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    if adjoint:
        out = _triangular(lu, b, left=True, lower=False, turn=True)
        out = _triangular(lu, out, left=True, lower=True, turn=True, unit=True)
        return jnp.take_along_axis(out, jnp.argsort(permutation, -1)[..., None], -2)
    b = jnp.take_along_axis(b, permutation[..., None], -2)
    out = _triangular(lu, b, left=True, lower=True, unit=True)
    return _triangular(lu, out, left=True, lower=False)


@lowers("cholesky_solve")
@exact
def cholesky_solve(self: Any, input2: Any, upper: bool = False) -> Any:
    """The x that solves a system with self, given the matrix's Cholesky factor."""
    lower = _adjoint(input2) if upper else input2
    out = _triangular(lower, self, left=True, lower=True)
    return _triangular(lower, out, left=True, lower=True, turn=True)


@lowers("cholesky_inverse")
@exact
def cholesky_inverse(self: Any, upper: bool = False) -> Any:
    """The inverse of a matrix, given its Cholesky factor."""
    one = jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)
    return cholesky_solve(one, self, upper)


@lowers("linalg_qr")
@exact
def qr(a: Any, mode: str = "reduced") -> tuple[Any, Any]:
    """The orthogonal and the triangular factor."""
    if mode == "r":
        return jnp.zeros(0, a.dtype), jnp.linalg.qr(a, mode="r")
    q, r = jnp.linalg.qr(a, mode=mode)
    return q, r


@lowers("_linalg_svd")
@exact
def svd(
    a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Any, Any, Any]:
    """The singular values, with vectors if asked for."""
    if compute_uv:
        u, s, vh = jnp.linalg.svd(a, full_matrices=full_matrices)
        return u, s, vh
    return jnp.zeros(0, a.dtype), jnp.linalg.svd(a, compute_uv=False), jnp.zeros(0, a.dtype)


@lowers("_linalg_eigh")
@exact
def eigh(a: Any, uplo: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    """The eigenvalues, with vectors if asked for."""
    values, vectors = jnp.linalg.eigh(a, UPLO=uplo.upper(), symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(0, a.dtype)


@lowers("linalg_matrix_exp")
def matrix_exp(self: Any) -> Any:
    """The exponential of a matrix."""
    return jnp.vectorize(jsl.expm, signature="(n,n)->(n,n)")(wide(self))
