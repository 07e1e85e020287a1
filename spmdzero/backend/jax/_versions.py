"""What differs between the versions of JAX and torch that this backend works with."""

import contextlib
import functools
from typing import Any

import jax
import torch

from spmdzero.backend._traced import traced as for_program


def wide_numbers() -> contextlib.AbstractContextManager[object]:
    """Inside, JAX has numbers of 64 bits, as torch does; elsewhere JAX stays as its user set it."""
    return _enable_x64(True)


def narrow_numbers() -> contextlib.AbstractContextManager[object]:
    """Inside of `wide_numbers`, JAX has numbers of 32 bits again, which Pallas's kernels need."""
    return _enable_x64(False)


def _enable_x64(enabled: bool) -> contextlib.AbstractContextManager[object]:
    context = getattr(jax, "enable_x64", None)
    if context is None or not callable(context):
        from jax.experimental import enable_x64 as context
    return context(enabled)


@functools.cache
def solve_turns_its_matrix() -> bool:
    """Whether torch's solve returns the LU of the transposed matrix, and its gradient expects it.

    torch 2.9 does and 2.14 doesn't: it is asked, for a matrix of which the first row is kept in
    its place where it is not transposed.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        pivots = torch.ops.aten._linalg_solve_ex(
            torch.tensor([[2.0, 4.0], [1.0, 1.0]]), torch.ones(2)
        )[2]
    return pivots[0].item() == 2


def has_host_memory() -> bool:
    """Whether the devices of the program being traced have memory apart from the host's."""
    return (for_program.platform or jax.default_backend()).upper() != "CPU"


def moved(array: Any, *, host: bool) -> Any:
    """What JAX traces of `array` in the host's memory, or in the device's; on CPUs they are one."""
    if not has_host_memory():
        # JAX 0.7.1 would annotate outputs too, and its partitioner for CPUs ends at that.
        return array
    memory = getattr(jax, "memory", None)
    if memory is not None:
        return jax.device_put(array, memory.Space.Host if host else memory.Space.Device)
    from jax._src.sharding_impls import TransferToMemoryKind

    return jax.device_put(array, TransferToMemoryKind("pinned_host" if host else "device"))


def lowered_for(traced: Any, platform: str) -> Any:
    """A traced program, lowered for devices that need not be here, such as ``"tpu"``.

    As for an export, which writes Pallas's kernels in the older Mosaic version that a compiler
    apart from this JAX reads: libtpu 0.0.21 answers what jax 0.7.1 lowers otherwise with
    "expected <= 7 but got 8".
    """
    from jax._src.interpreters import mlir

    return traced.lower(
        lowering_platforms=(platform,),
        _private_parameters=mlir.LoweringParameters(for_export=True),
    )
