"""Tensors in the form in which a placement stores them: whole, a shard of a dim, or flat."""

import math

import torch
import torch.nn.functional as F

from spmdzero.backend._current import arrays
from spmdzero.backend._mesh import Mesh
from spmdzero.plan import Placement


def store(mesh: Mesh, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """A copy of a whole tensor in the form that `placement` stores: padded flat, or a shard."""
    shape = tuple(tensor.shape)
    stored = placement.stored_shape(shape, mesh.spec)
    if placement.kind == "flat":
        tensor = F.pad(tensor.reshape(-1), (0, stored[0] - tensor.numel()))
    else:
        tensor = arrays.fresh(tensor)
    return mesh.mark(tensor, placement.partition_spec(shape, mesh.spec))


def gather(
    mesh: Mesh, stored: torch.Tensor, placement: Placement, shape: tuple[int, ...]
) -> torch.Tensor:
    """The whole tensor of `shape` that `store` made `stored` from, replicated."""
    whole = mesh.mark(arrays.fresh(stored))
    return whole[: math.prod(shape)].reshape(shape) if placement.kind == "flat" else whole


def stored_zeros(
    mesh: Mesh, shape: tuple[int, ...], placement: Placement, dtype: torch.dtype
) -> torch.Tensor:
    """Zeros in the form in which `placement` stores a tensor of `shape`."""
    stored = placement.stored_shape(shape, mesh.spec)
    return mesh.zeros(stored, dtype, placement.partition_spec(shape, mesh.spec))
