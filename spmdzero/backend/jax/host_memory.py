"""Tensors and values in the host's memory: see `HostMemory` of the protocols.

Only programs for TPUs move values of the region. Other programs are the same without the moves.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import torch

from spmdzero.backend.jax import _memory
from spmdzero.backend.jax._dispatch import own_value, value_of
from spmdzero.backend.jax._operations import KEEP_ON_HOST, MeshOp
from spmdzero.backend.jax._tensor import LazyTensor, over
from spmdzero.backend.jax._values import record
from spmdzero.backend.jax._versions import moved, moves_to_host
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.backend.protocols._mesh import Mesh, PartitionSpec


def keep(mesh: Mesh, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """Has `tensor` rest in the host's memory from now on, whatever is written into it."""
    assert isinstance(mesh, DeviceMesh)
    assert isinstance(tensor, LazyTensor)
    spec = tuple(spec or (None,) * tensor.dim())
    tensor.cell.home = _memory.keep(spec, mesh.devices, mesh.key)
    return mesh.mark(tensor, spec)


def fetch(
    mesh: Mesh,
    tensors: Sequence[torch.Tensor],
    specs: Sequence[PartitionSpec],
    *,
    after: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """The same in the devices' memory: they leave the host's once `after` is computed."""
    assert isinstance(mesh, DeviceMesh)
    op = _memory.fetch([tuple(spec) for spec in specs], mesh.devices, mesh.key)
    values = tuple([own_value(tensor) for tensor in (*tensors, *after)])
    forms = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return [over(value) for value in record(op, values, {}, forms)]


def missing() -> str:
    """Why the traced program moves nothing to the host's memory, ``""`` where it does."""
    if moves_to_host():
        return ""
    on_cpu = jax.default_backend() == "cpu"
    return "the memory of CPU devices is the host's" if on_cpu else "only TPU programs move it"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The value of `tensor` in host memory, for `from_host` only; autograd records nothing."""
    return _recorded(MeshOp((KEEP_ON_HOST,), functools.partial(moved, host=True)), tensor)


def from_host(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The value that `to_host` was given, copied to the devices once `after` is computed."""
    return _recorded(MeshOp(("fetch from the host",), _fetched), tensor, after)


def _recorded(op: MeshOp, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    values = tuple(map(value_of, (tensor, *others)))
    return over(record(op, values, {}, [(values[0].shape, values[0].dtype)])[0])


def _fetched(array: Any, after: Any) -> Any:
    # Without the barrier the compiler starts the copy early, and the device holds it all along.
    held, _ = jax.lax.optimization_barrier((array, after))
    return moved(held, host=False)
