"""Entering and leaving replica space: shorter forms of a mesh's methods."""

import torch

from spmdzero.backend._current import arrays
from spmdzero.backend.protocols._mesh import Mesh


def enter_copy(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This device's copy of a whole tensor."""
    return mesh.enter(tensor, (None,) * tensor.dim())


def leave_stacked(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """`[n, *shape]`, row i living on device i: a partial if the rows are to be summed."""
    shape = tuple(tensor.shape)
    return mesh.leave(tensor[None], mesh.batch_spec(len(shape) + 1), (mesh.replicas, *shape))


def read_stacked(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The values of all replicas, `[n, *shape]` on the CPU."""
    if not tensor.numel():
        return torch.empty((mesh.replicas, *tensor.shape), dtype=tensor.dtype)
    return arrays.read(leave_stacked(tensor.detach(), mesh))
