"""The global L2 norm of sharded tensors: a single scalar crosses the wire."""

from collections.abc import Sequence

import torch

from spmdzero.backend._current import programs
from spmdzero.backend.protocols._mesh import Mesh, PartitionSpec
from spmdzero.plan import names_of

_Placed = Sequence[tuple[torch.Tensor, PartitionSpec]]


def global_norm(tensors: _Placed, mesh: Mesh) -> torch.Tensor:
    """The L2 norm over all elements of all `tensors`, 0-dim fp32, replicated.

    Each device sums the squares of its own shards first. A sum in global space would cost one
    all-reduce for each tensor, because XLA's CPU compiler does not combine them.
    """
    whole, shards, shared = [], [], []
    for tensor, spec in tensors:
        over_tensor = _dim_over("tensor", spec) is not None
        kind = shared if over_tensor else whole
        (kind if _dim_over("fsdp", spec) is None else shards).append((tensor, spec))
    squares = [tensor.float().pow(2).sum() for tensor, _ in whole]
    with programs.scope("zero.norm/global"):
        squares += _squares(shared, mesh)
        if shards:
            local = _squares([(mesh.enter(t, s), s) for t, s in shards], mesh)
            total = torch.stack(local).sum().reshape(1)
            axes = mesh.spec.states_of_region
            stacked = mesh.leave(total, (axes,), (mesh.spec.parts(axes),))
            squares.append(mesh.whole(stacked.sum()))
    return mesh.whole(torch.stack(squares).sum().sqrt())


def _squares(tensors: _Placed, mesh: Mesh) -> list[torch.Tensor]:
    """Sums of squares: of each tensor, but of those that an axis of one replica splits together.

    These stay apart for each device of the axis until all are added: one all-reduce, not one each.
    """
    sums, apart = list[torch.Tensor](), list[torch.Tensor]()
    # A replica is shared over one axis, or none.
    axis, parts = next(iter(mesh.spec.sharing.items()), ("tensor", 1))
    for tensor, spec in tensors:
        square, dim = tensor.float().pow(2), _dim_over(axis, spec)
        if dim is None:
            sums.append(square.sum())
        else:
            apart.append(square.movedim(dim, 0).reshape(parts, -1).sum(1))
    return sums + ([torch.stack(apart).sum(0).sum()] if apart else [])


def _dim_over(axis: str, spec: PartitionSpec) -> int | None:
    return next((dim for dim, entry in enumerate(spec) if axis in names_of(entry)), None)
