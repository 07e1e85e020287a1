"""Shows the effect of annotations without an engine: on one tensor, and on a whole module."""

from collections.abc import Sequence

import torch

from spmdzero.backend import current, programs, runtime
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect._ledger import CollectiveLedger
from spmdzero.plan import MeshSpec


def backend_name() -> str:
    """The backend of this process: ``"jax"`` or ``"torch_xla"``."""
    return current().name


def place(
    tensor: torch.Tensor, annotation: Sequence[str | None], mesh: MeshSpec | None = None
) -> torch.Tensor:
    """Places `tensor` on all devices; each device holds the part that the annotation gives it.

    Args:
        tensor: a tensor on the CPU, of any shape and dtype.
        annotation: for each dim the mesh axis that splits it, or None.
        mesh: the mesh; by default one axis, ``fsdp``, over all devices.

    Raises:
        SpmdZeroUsageError: the annotation doesn't fit the tensor or the mesh.
    """
    spec = _spec(mesh)
    sizes = dict(spec.axes)
    if len(annotation) != tensor.ndim:
        raise SpmdZeroUsageError(
            f"the annotation {tuple(annotation)} has {len(annotation)} entries, the tensor "
            f"{list(tensor.shape)} has {tensor.ndim} dims: write an axis or None for each dim"
        )
    for dim, axis in enumerate(annotation):
        if axis is not None and axis not in sizes:
            raise SpmdZeroUsageError(
                f"the mesh has no axis {axis!r}: it has {', '.join(map(repr, sizes))}"
            )
        if axis is not None and tensor.shape[dim] % sizes[axis]:
            raise SpmdZeroUsageError(
                f"the {sizes[axis]} devices of the axis {axis!r} can't split dim {dim} of "
                f"{list(tensor.shape)} evenly: pad it to a multiple of {sizes[axis]}"
            )
    return current().mesh(spec).place(tensor, tuple(annotation))


def propagated(module: torch.nn.Module, batch: torch.Tensor) -> CollectiveLedger:
    """The ledger of `module` if only the batch is split and propagation does the rest.

    The loss is the mean square of the module's output; gradients are taken of `batch` and of all
    parameters, which are replicated. No engine and no replica region takes part. The module moves
    to the devices.

    Args:
        module: the module.
        batch: `[rows, ...]` of floats on the CPU; the devices share the rows.

    Raises:
        SpmdZeroUsageError: the devices can't share the rows evenly.
    """
    spec = _spec(None)
    mesh = current().mesh(spec)
    rows: tuple[str | None, ...] = ("fsdp", *[None] * (batch.ndim - 1))
    x = place(batch, rows, spec).requires_grad_()
    module.to(runtime.device())
    for parameter in module.parameters():
        mesh.whole(parameter.data)
    runtime.sync()
    # Names of operations tell the ledger what a collective belongs to.
    programs.record_scopes(True, by=module)
    try:
        module(x).square().mean().backward()
        gradients = [tensor.grad for tensor in (x, *module.parameters())]
        text = programs.optimized_hlo([grad for grad in gradients if grad is not None])
    finally:
        programs.record_scopes(False, by=module)
    return CollectiveLedger.from_hlo(text)


def _spec(mesh: MeshSpec | None) -> MeshSpec:
    """`mesh`, or one axis over all devices.

    Raises:
        SpmdZeroUsageError: `mesh` doesn't have the number of devices of this job.
    """
    runtime.start()
    count = runtime.device_count()
    spec = mesh or MeshSpec((("fsdp", count),))
    if spec.size != count:
        raise SpmdZeroUsageError(
            f"the mesh {dict(spec.axes)} has {spec.size} devices, here are {count}"
        )
    return spec
