"""Entering and leaving manual sharding: between global space and replica space."""

import torch

from spmdzero.backend._mesh import PartitionSpec
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla.arrays import fresh
from spmdzero.backend.torch_xla.mesh import DeviceMesh


def enter(tensor: torch.Tensor, mesh: DeviceMesh, spec: PartitionSpec) -> torch.Tensor:
    """This device's shard of a global tensor: `[b, ...]` becomes `[b/n, ...]` along each axis."""
    return _private.full_to_shard(mesh.mark(fresh(tensor), spec))


def enter_copy(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This device's copy of a whole tensor."""
    return enter(tensor, mesh, (None,) * tensor.dim())


def leave(
    tensor: torch.Tensor, mesh: DeviceMesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> torch.Tensor:
    """The global tensor of `shape` whose shard on each device is `tensor`."""
    return _private.shard_to_full(tensor.clone(), mesh.operation(spec), shape)


def leave_stacked(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """`[n, *shape]`, row i living on device i: a Partial when the rows are to be summed."""
    shape = tuple(tensor.shape)
    return leave(tensor[None], mesh, mesh.batch_spec(len(shape) + 1), (mesh.size, *shape))


def read_stacked(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The values of all replicas, `[n, *shape]` on the CPU."""
    if not tensor.numel():
        return torch.empty((mesh.size, *tensor.shape), dtype=tensor.dtype)
    return leave_stacked(tensor.detach(), mesh).cpu()
