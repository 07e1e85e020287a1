"""Conversions between a script, with its own host's rows, and its engine, with all hosts' rows.

A loss of a host's own rows belongs to that host, and so do the gradients behind it, as on a
DeepSpeed rank. Where they reach tensors of all hosts, they become the gradients of the mean over
hosts.
"""

from typing import cast

import torch

from spmdzero.backend._current import arrays, runtime
from spmdzero.backend.forms._crossing import Crossing, Way
from spmdzero.backend.protocols._mesh import Across
from spmdzero.plan import MeshSpec


def local_replicas(mesh: MeshSpec) -> int:
    """Number of this process's data-parallel replicas: its devices, unless some share rows."""
    return mesh.replicas // runtime.process_count()


def to_own_rows(tensor: torch.Tensor, dim: int, across: Across) -> torch.Tensor:
    """`Across.own_rows`, whose gradient is the mean over hosts."""
    return _crossed(
        tensor,
        lambda whole: across.own_rows(whole, dim),
        lambda grad: across.all_rows(grad, dim) / across.hosts,
    )


def to_all_rows(tensor: torch.Tensor, dim: int, across: Across) -> torch.Tensor:
    """`Across.all_rows`, whose gradient is that of this host's part of a mean over hosts."""
    return _crossed(
        tensor,
        lambda own: across.all_rows(own, dim),
        lambda grad: across.own_rows(grad, dim) * across.hosts,
    )


def keep_same(tensor: torch.Tensor, across: Across) -> torch.Tensor:
    """A copy of a tensor that is the same on all hosts; its gradient is the mean over hosts."""
    return _crossed(tensor, arrays.fresh, across.mean)


def _crossed(tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    return cast(torch.Tensor, Crossing.apply(tensor, there, back))
