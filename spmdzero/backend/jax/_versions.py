"""Differences between the versions of JAX and torch that this backend works with."""

import contextlib
import functools
from typing import Any

import jax
import torch


def wide_numbers() -> contextlib.AbstractContextManager[object]:
    """Context in which JAX has 64-bit numbers, as torch has; outside the user's setting holds."""
    return _enable_x64(True)


def narrow_numbers() -> contextlib.AbstractContextManager[object]:
    """Context inside `wide_numbers` in which JAX has 32-bit numbers, as Pallas kernels need."""
    return _enable_x64(False)


def _enable_x64(enabled: bool) -> contextlib.AbstractContextManager[object]:
    context = getattr(jax, "enable_x64", None)
    if context is None or not callable(context):
        from jax.experimental import enable_x64 as context
    return context(enabled)


@functools.cache
def solve_turns_its_matrix() -> bool:
    """Whether torch's solve returns the LU of the transposed matrix, as its gradient then expects.

    torch 2.9 does and 2.14 doesn't. Solving with a matrix that needs no pivoting unless it is
    transposed shows it.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        pivots = torch.ops.aten._linalg_solve_ex(
            torch.tensor([[2.0, 4.0], [1.0, 1.0]]), torch.ones(2)
        )[2]
    return pivots[0].item() == 2


def lowered_for(traced: Any, platform: str) -> Any:
    """A traced program, lowered for devices that need not be here, such as ``"tpu"``.

    It is lowered as for an export, which writes Pallas kernels in the older Mosaic version that a
    compiler apart from this JAX reads: otherwise libtpu 0.0.21 refuses programs of jax 0.7.1 with
    "expected <= 7 but got 8".
    """
    from jax._src.interpreters import mlir

    return traced.lower(
        lowering_platforms=(platform,),
        _private_parameters=mlir.LoweringParameters(for_export=True),
    )
