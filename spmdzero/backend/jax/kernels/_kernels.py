"""Pallas kernels inside programs with 64-bit numbers, by a primitive of JAX's.

JAX builds kernels when it lowers a trace, and they need 32-bit numbers then, too.
"""

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.extend.core import Primitive
from jax.interpreters import mlir

from spmdzero.backend.attention import Direction, Form, jax_function
from spmdzero.backend.jax._versions import narrow_numbers, with_all_axes_manual
from spmdzero.backend.jax.kernels import _grouped_kernels as grouped
from spmdzero.backend.jax.ops import jax_dtype

_kernels = Primitive("spmdzero_kernels")
_kernels.multiple_results = True


def call(
    direction: Direction,
    form: Form,
    made: Sequence[tuple[tuple[int, ...], torch.dtype]],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Calls `jax_function` on traced arrays.

    Args:
        direction, form: of the kernel.
        made: shape and dtype of each result.
        arrays: query, key and value, and further arguments of the kernel.
    """
    forms = tuple((shape, jax_dtype(dtype)) for shape, dtype in made)
    made_by, scope = (jax_function, direction, form), f"attention.{direction}{form.scope}"
    return _kernels.bind(*arrays, made_by=made_by, scope=scope, dtype=form.dtype, forms=forms)


def call_grouped(
    form: grouped.Form, rows: jax.Array, others: jax.Array, ends: jax.Array
) -> jax.Array:
    """Calls `_grouped_kernels.grouped` on traced arrays."""
    shape = (form.groups, form.inner) if form.summed else (form.rows,)
    forms = (((*shape, form.outer), rows.dtype),)
    (made,) = _kernels.bind(
        rows, others, ends, made_by=(grouped.grouped, form), scope="aten__grouped_mm",
        dtype=form.dtype, forms=forms,
    )  # fmt: skip
    return made


@_kernels.def_abstract_eval
def _results(*_: Any, forms: Any, **__: Any) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in forms]


def _lowered(
    context: Any, *arrays: Any, made_by: tuple[Any, ...], scope: str, dtype: str, forms: Any
) -> Any:
    # A TPU multiplies 16-bit numbers in one pass, and its compiler refuses more passes.
    precision = "highest" if dtype == "float32" else "default"
    make, *about = made_by
    function = jax.named_scope(scope)(make(*about))
    inside = with_all_axes_manual(context)
    with narrow_numbers(), jax.default_matmul_precision(precision):
        return mlir.lower_fun(function, multiple_results=True)(inside, *arrays)


mlir.register_lowering(_kernels, _lowered)
