"""Between a script, which has its own host's rows, and its engine, which has those of all hosts.

A loss of a host's own rows is that host's own, and so are the gradients behind it, as on a
DeepSpeed rank. They become those of the mean over hosts where they reach what all hosts have.
"""

from typing import cast

import torch

from spmdzero.backend._current import arrays
from spmdzero.backend.forms._crossing import Crossing, Way
from spmdzero.backend.protocols._mesh import Across


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
    """What all hosts have the same, to be computed with; its gradient is the mean over hosts."""
    return _crossed(tensor, arrays.fresh, across.mean)


def _crossed(tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    return cast(torch.Tensor, Crossing.apply(tensor, there, back))
