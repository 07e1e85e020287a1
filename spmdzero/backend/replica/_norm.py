"""The global L2 norm of sharded tensors: a single scalar crosses the wire."""

from collections.abc import Sequence

import torch

from spmdzero.backend._current import programs
from spmdzero.backend.protocols._mesh import REPLICATED, Mesh, PartitionSpec


def global_norm(tensors: Sequence[tuple[torch.Tensor, PartitionSpec]], mesh: Mesh) -> torch.Tensor:
    """The L2 norm over all elements of all `tensors`, 0-dim fp32, replicated.

    Each device sums the squares of its own shards first. A sum in global space would cost one
    all-reduce for each tensor, because XLA's CPU compiler does not combine them.
    """
    whole, shards = [], []
    for tensor, spec in tensors:
        (shards if any(axis is not None for axis in spec) else whole).append((tensor, spec))
    squares = [tensor.float().pow(2).sum() for tensor, _ in whole]
    with programs.scope("zero.norm/global"):
        if shards:
            local = [mesh.enter(t, s).float().pow(2).sum() for t, s in shards]
            total = torch.stack(local).sum().reshape(1)
            stacked = mesh.leave(total, (mesh.spec.states,), (mesh.spec.shards,))
            squares.append(mesh.mark(stacked.sum(), REPLICATED))
    return mesh.mark(torch.stack(squares).sum().sqrt(), REPLICATED)
