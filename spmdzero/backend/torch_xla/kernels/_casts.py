"""Writes of results that the written tensor can't hold: torch_xla would cut off digits."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import meta_table

from spmdzero._user_line import user_line
from spmdzero.backend.torch_xla.kernels._wrap import put_kernel
from spmdzero.errors import SpmdZeroRuntimeError

_aten = torch.ops.aten
# torch calls a meta kernel before each write in place. Those of other operations do refuse.
_IN_PLACE = (
    _aten.add_.Tensor,
    _aten.add_.Scalar,
    _aten.sub_.Tensor,
    _aten.sub_.Scalar,
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten.addcmul_.default,
    _aten.addcdiv_.default,
    _aten.logit_.default,
)
_MAKE_FLOATS = (_aten.div_.Tensor, _aten.div_.Scalar, _aten.logit_.default)


@functools.cache
def refuse_casts_in_place() -> None:
    """Makes `ints /= 2`, `ints *= 1.5` and `floats += 1j` raise, as they do in torch."""
    for operation in _IN_PLACE:
        checked = functools.partial(_checked, operation, meta_table.get(operation))
        put_kernel(operation.name().removeprefix("aten::"), checked, key="Meta")


def _checked(
    operation: Any, meta: Callable[..., Any] | None, _: Any, written: Any, *args: Any, **kwargs: Any
) -> Any:
    operands = [a for a in args if isinstance(a, torch.Tensor | bool | int | float | complex)]
    if operation is _aten.logit_.default:
        operands = []
    results = [torch.result_type(written, _as_given(operand)) for operand in operands]
    if operation in _MAKE_FLOATS and not (
        written.dtype.is_floating_point or written.dtype.is_complex
    ):
        results.append(torch.get_default_dtype())
    for result in results:
        if not torch.can_cast(result, written.dtype):
            raise SpmdZeroRuntimeError(_refusal(str(operation), result, written.dtype))
    return written if meta is None else meta(written, *args, **kwargs)


def _as_given(operand: Any) -> Any:
    # A Python number arrives as a tensor of the widest dtype.
    if isinstance(operand, torch.Tensor) and not operand.dim():
        return {torch.float64: 1.0, torch.complex128: 1j}.get(operand.dtype, operand)
    return operand


def _refusal(operation: str, result: torch.dtype, wanted: torch.dtype) -> str:
    """The message that `operation` can't write a `result` into a tensor of the `wanted` dtype."""
    return (
        f"{user_line()}: {operation}: result type {result} can't be cast to the desired output "
        f"type {wanted}. Convert the tensor first, tensor.to({result}), or take the form that "
        "returns a new one"
    )
