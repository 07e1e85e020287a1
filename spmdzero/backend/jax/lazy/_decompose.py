"""Operations that torch composes of others, which are recorded in their place."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from spmdzero._torch_xla import torch_xla_is_kept_out
from spmdzero._user_line import user_line
from spmdzero.errors import ReplicaRegionError, SpmdZeroRuntimeError

# The key of torch's kernels that do a list's operation tensor by tensor.
_ONE_BY_ONE = torch._C.DispatchKey.CompositeExplicitAutograd


@functools.cache
def kernel_of_others(func: Any) -> Callable[..., Any] | None:
    """torch's kernel that calls other operations; None if `func` has no such kernel."""
    if _has_kernel(func, "CompositeImplicitAutograd"):
        return func.decompose
    if func.name().startswith("aten::_foreach_") and _has_kernel(func, _ONE_BY_ONE.name):
        return functools.partial(func._op_dk, _ONE_BY_ONE)
    return None


def _has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@functools.cache
def _decompositions() -> Mapping[Any, Any]:
    table = core_aten_decompositions()
    # Copy it: torch's table is no real dict, and its `get` finds nothing.
    return {func: table[func] for func in table}


def decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes an operation without an entry in the table by torch's decomposition.

    Raises:
        ReplicaRegionError: the result's shape depends on values.
        SpmdZeroRuntimeError: torch has no decomposition.
    """
    if func.namespace == "prims":
        # torch's decompositions are written in these operations.
        return func.prim_impl_aten(*args, **kwargs)
    known = _decompositions().get(func)
    if known is not None:
        return known(*args, **kwargs)
    if torch.Tag.dynamic_output_shape in func.tags:
        raise of_data(func)
    raise SpmdZeroRuntimeError(
        f"{user_line()}: {func} has no entry in the JAX backend's table of operations, and torch "
        f"decomposes it into none that have. {instead()}"
    )


def instead() -> str:
    """Says what to do in the place of an operation that this backend can't compute."""
    other = ', or set "spmd": {"backend": "torch_xla"}' if torch_xla_is_kept_out() else ""
    return f"Write it with other operations{other}"


def of_data(func: Any) -> ReplicaRegionError:
    """The error for an operation whose result has a shape that depends on values."""
    return ReplicaRegionError(
        f"{user_line()}: {func} makes a tensor whose shape depends on data, and a compiled "
        "program has the same shapes for any. Use torch.where or a mask of the same shape"
    )
