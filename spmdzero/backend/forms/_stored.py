"""Tensors as a layout stores them: whole, sharded along a dim, or flat."""

import math

import torch
import torch.nn.functional as F

from spmdzero.backend._current import arrays, host_memory
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.plan import Layout


def store(mesh: Mesh, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy of a whole tensor as `layout` stores it: padded flat, a shard, or whole."""
    if layout.kind == "flat":
        tensor = F.pad(tensor.reshape(-1), (0, layout.stored[0] - tensor.numel()))
    else:
        tensor = arrays.fresh(tensor)
    return mesh.lay(tensor, layout)


def gather(mesh: Mesh, stored: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The whole tensor that `store` made `stored` from, replicated."""
    whole = mesh.whole(arrays.fresh(stored))
    if layout.kind != "flat":
        return whole
    return whole[: math.prod(layout.shape)].reshape(layout.shape)


def relaid(mesh: Mesh, stored: torch.Tensor, *, now: Layout, to: Layout) -> torch.Tensor:
    """A copy of a tensor stored as `now` says, in the form that `to` stores."""
    if (now.kind == "flat") == (to.kind == "flat"):
        # Both have the same stored shape: an annotation says which part each device holds.
        return mesh.lay(arrays.fresh(stored), to)
    whole = gather(mesh, stored, now) if now.over_fsdp else stored
    return store(mesh, whole, to) if to.is_sharded else whole


def resting(mesh: Mesh, stored: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns what is stored as `layout` says, in the memory in which that has it rest."""
    return host_memory().keep(mesh, stored, layout.spec) if layout.on_host else stored


def stored_zeros(mesh: Mesh, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in the form that `layout` stores."""
    return mesh.zeros(layout.stored, dtype, layout.spec)
