"""Differences between the versions of JAX and torch that this backend works with."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import torch

from spmdzero.backend._traced import traced as for_program


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


def is_for_tpu() -> bool:
    """Whether the traced program is for TPUs, which have a memory apart from the host's."""
    return (for_program.platform or jax.default_backend()).upper() == "TPU"


def moved(array: Any, *, host: bool) -> Any:
    """A traced array, moved to the host's memory or to the device's; itself off the TPU."""
    if not is_for_tpu():
        # JAX annotates the outputs too, which XLA's partitioner for CPUs can't read (0.7.1).
        return array
    memory = getattr(jax, "memory", None)
    if memory is not None:
        return jax.device_put(array, memory.Space.Host if host else memory.Space.Device)
    from jax._src.sharding_impls import TransferToMemoryKind  # type: ignore[missing-module-attribute]

    return jax.device_put(array, TransferToMemoryKind("pinned_host" if host else "device"))


def unwritten(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array to be written: of any values on TPUs, of zeros elsewhere and in an older JAX."""
    empty = getattr(jax.lax, "empty", None)
    return jax.numpy.zeros(shape, dtype) if empty is None else empty(shape, dtype)


def is_on_host(form: Any) -> bool:
    """Whether a traced value of this form is in the host's memory."""
    return form.memory_space == jax.memory.Space.Host


def context_mesh(mesh: jax.sharding.Mesh) -> Any:
    """The mesh by which a sharding is named at this place of a trace.

    Inside of a `shard_map` some of its axes are divided already. From 0.8 on JAX refuses to compute
    of two arrays that say otherwise of each other; 0.7.1 can't lower what says so.
    """
    here = jax.sharding.get_abstract_mesh()
    return mesh if here.empty or jax.__version_info__ < (0, 8) else here


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


def with_all_axes_manual(context: Any) -> Any:
    """The context of a lowering in which axes that an outer `shard_map` divides count as divided.

    In a `shard_map` within another one jax 0.7.1 counts only its own axes, and refuses Pallas
    kernels there, since the compiler would have to divide them.
    """
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None or not hasattr(axes, "manual_axes"):
        return context
    outer = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is jax.sharding.AxisType.Manual
    }
    axes = dataclasses.replace(axes, manual_axes=axes.manual_axes | outer)
    return context.replace(module_context=context.module_context.replace(axis_context=axes))
