"""Operations that are answered instead of recorded: copies, reads, and hidden writes."""

import math
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend.jax.kernels._grouped import grouped_mm
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._dispatch import (
    LIFTS,
    copied,
    dispatched,
    meta_result,
    read,
    recorded,
    special,
    value_of,
)
from spmdzero.backend.jax.lazy._tensor import LazyTensor, become, meta_of, over
from spmdzero.backend.jax.lazy._writes import write
from spmdzero.errors import SpmdZeroRuntimeError

_aten = torch.ops.aten


@special(_aten.clone.default)
def _clone(tensor: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    made = meta_result(_aten.clone.default, (tensor,), {"memory_format": memory_format})
    return over(copied(value_of(tensor)), made)


# In inference mode `detach_` arrives here: there is no gradient to detach from.
@special(*LIFTS, _aten.detach_.default)
def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@special(_aten._to_copy.default)
def _to_copy(tensor: torch.Tensor, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
    if device is not None and torch.device(device).type == "cpu":
        # C++ knows no other device, and may ask for a CPU copy when it means a lazy tensor.
        device = None
    if device is not None and torch.device(device).type == "meta":
        # C++ asks for the shape of a sum one of whose terms is a zero that it never made.
        return meta_of(tensor).to(kwargs.get("dtype") or tensor.dtype)
    if isinstance(tensor, LazyTensor):
        return recorded(_aten._to_copy.default, (tensor,), kwargs)
    return over(_host.moved(torch.ops.aten._to_copy.default(tensor, **kwargs)))


@special(_aten._local_scalar_dense.default)
def _scalar(tensor: torch.Tensor) -> Any:
    return read(tensor).item()


@special(_aten.is_pinned.default)
def _never(*_: Any, **__: Any) -> bool:
    return False


@special(_aten.equal.default)
def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(dispatched(_aten.eq.Tensor, (one, other), {}).all().item())


@special(_aten.is_same_size.default)
def _is_same_size(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape


@special(_aten._has_same_storage_numel.default)
def _has_same_storage_numel(one: LazyTensor, other: LazyTensor) -> bool:
    return math.prod(one.cell.value.shape) == math.prod(other.cell.value.shape)


@special(_aten._linalg_check_errors.default)
def _check_errors(*_: Any, **__: Any) -> None:
    # Whether a matrix is singular is known once the devices have computed it; the results are NaN
    # or infinite then. An error here would have to wait for them.
    return None


@special(_aten.allclose.default)
def _allclose(one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return bool(dispatched(_aten.isclose.default, (one, other, *args), kwargs).all().item())


def _grouped_mm(
    tensor: torch.Tensor, mat2: torch.Tensor, offs: Any = None, bias: Any = None, dtype: Any = None
) -> torch.Tensor:
    if bias is not None or (dtype is not None and dtype != tensor.dtype):
        raise SpmdZeroRuntimeError(
            f"{user_line()}: _grouped_mm with a bias or of another dtype is not known to the JAX "
            "backend. Add the bias to the result, or cast it"
        )
    if tensor.dtype != mat2.dtype:
        raise RuntimeError(
            f"{user_line()}: _grouped_mm takes tensors of different dtypes, {tensor.dtype} and "
            f"{mat2.dtype}. Cast one"
        )
    # torch's meta kernel accepts only bf16, while its CPU kernel takes float32 too.
    shape = [*tensor.shape[-2:-1], mat2.shape[-1]]
    if tensor.dim() == mat2.dim():
        shape.insert(0, tensor.shape[0] if tensor.dim() == 3 else offs.shape[0])
    like = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return grouped_mm(tensor, mat2, offs, like)


# A torch without the operation has no model that uses it.
if hasattr(_aten, "_grouped_mm"):
    special(_aten._grouped_mm.default)(_grouped_mm)


@special(_aten.set_.source_Tensor)
def _set(tensor: LazyTensor, source: LazyTensor) -> torch.Tensor:
    become(tensor, source)
    return tensor


@special(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *more: float
) -> Any:
    # `native_batch_norm` writes the running statistics without saying so in its schema.
    if mean is None:
        func = _aten._native_batch_norm_legit.no_stats
        return dispatched(func, (x, weight, bias, training, *more), {})
    if not training:
        func = _aten._native_batch_norm_legit_no_training.default
        return dispatched(func, (x, weight, bias, mean, var, *more), {})
    func = _aten._native_batch_norm_legit_functional.default
    *made, new_mean, new_var = dispatched(func, (x, weight, bias, mean, var, training, *more), {})
    write(mean, value_of(new_mean))
    write(var, value_of(new_var))
    return tuple(made)
