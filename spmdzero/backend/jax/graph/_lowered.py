"""Results of operations as traced JAX arrays, and a check at recording that JAX can make them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmdzero._user_line import user_line
from spmdzero.backend.forms._tree import form_of, mapped
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.lazy._decompose import instead
from spmdzero.backend.jax.lazy._values import Value
from spmdzero.backend.jax.ops import UnsupportedError, jax_dtype, torch_dtype
from spmdzero.errors import SpmdZeroRuntimeError

Form = tuple[Sequence[int], torch.dtype]
# Keys of operations that JAX can trace. The set is emptied when it is full.
_known: set[Any] = set()
_MOST = 1 << 16


def lowered(op: Any, args: Any, kwargs: Any, forms: Sequence[Form] | None) -> list[Any]:
    """The results of an operation on arrays, with the shapes and dtypes that torch gives.

    Args:
        op: the operation.
        args, kwargs: its arguments.
        forms: shape and dtype of each result; None where torch doesn't know.

    Raises:
        UnsupportedError: the results have other shapes.
    """
    made = op(*args, **kwargs)
    # A gradient that wasn't asked for is None, in torch too.
    results: list[Any] = [*made] if isinstance(made, list | tuple) else [made]
    results = [result for result in results if result is not None]
    if forms is None:
        return [jnp.asarray(result) for result in results]
    return [
        _as_torch_says(op, shape, dtype, result)
        for (shape, dtype), result in zip(forms, results, strict=False)
    ]


def _as_torch_says(op: Any, shape: Sequence[int], dtype: torch.dtype, result: Any) -> Any:
    result = result if isinstance(result, jax.Array) else jnp.asarray(result)
    shape = tuple(shape)
    if result.shape != shape and not result.size and "batch_norm" in str(op.key):
        # torch's CPU kernels return no statistics in evaluation, but its meta kernels do;
        # they are never read.
        result = jnp.zeros(shape, result.dtype)
    if result.shape != shape:
        raise UnsupportedError(
            f"the JAX backend makes {list(result.shape)} of it and torch {list(shape)}, please "
            "report this"
        )
    wanted = jax_dtype(dtype)
    return result if result.dtype == wanted else result.astype(wanted)


def made_by(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A meta tensor for each result of an operation whose results torch doesn't know.

    Raises:
        UnsupportedError: the operation can't be computed with these arguments.
        SpmdZeroRuntimeError: JAX can't trace it.
    """
    try:
        with wide_numbers():
            function, shapes = alone(op, (args, dict(kwargs)), None, Value)
            made = jax.eval_shape(function, *shapes)
    except UnsupportedError:
        raise
    except Exception as error:
        raise SpmdZeroRuntimeError(f"{user_line()}: {refusal(op, error)}") from error
    return tuple(
        torch.empty(result.shape, dtype=torch_dtype(result.dtype), device="meta") for result in made
    )


def require_lowering(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], forms: Sequence[Form]
) -> None:
    """Refuses an operation that JAX can't trace, at the user's line and not when compiling.

    Args:
        op: the operation to be recorded.
        args, kwargs: its arguments; values stand for tensors.
        forms: shape and dtype of each result.

    Raises:
        SpmdZeroRuntimeError: JAX can't trace it.
    """
    key = (op.key, form_of((args, kwargs), (Value, float), _decides))
    if key in _known:
        return
    try:
        with wide_numbers():
            function, shapes = alone(op, (args, dict(kwargs)), forms, Value)
            jax.eval_shape(function, *shapes)
    except Exception as error:
        raise SpmdZeroRuntimeError(f"{user_line()}: {refusal(op, error)}") from error
    if len(_known) >= _MOST:
        _known.clear()
    _known.add(key)


def refusal(op: Any, error: Exception) -> str:
    """The message about an operation for which JAX raised an error."""
    fix = error.fix if isinstance(error, UnsupportedError) and error.fix else instead()
    said = str(error).split("\n--------------------", 1)[0].strip().rstrip(".")
    return f"{op.key} can't be computed by the JAX backend: {said}. {fix}"


def alone(
    op: Any, given: Any, forms: Sequence[Form] | None, kind: type
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """A function of arrays that computes an operation, and the forms of the arrays.

    Args:
        op: the operation.
        given: its positional arguments, and its named ones.
        forms: as in `lowered`.
        kind: the class that stands for tensors in `given`.
    """
    shapes: list[Any] = []

    def hold(tensor: Any) -> _Place:
        shapes.append(jax.ShapeDtypeStruct(tensor.shape, jax_dtype(tensor.dtype)))
        return _Place(len(shapes) - 1)

    places = mapped(given, kind, hold)

    def function(*arrays: Any) -> list[Any]:
        args, kwargs = mapped(places, _Place, arrays.__getitem__)
        return lowered(op, args, kwargs, forms)

    return function, shapes


class _Place(int):
    """The index of an array among the traced arguments."""


def _decides(leaf: Value | float) -> Hashable:
    # A float that changes at each step would be traced anew each time.
    return float if isinstance(leaf, float) else (leaf.shape, leaf.dtype)
