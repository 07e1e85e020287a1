"""A whole parameter behind its shards on the mesh."""

import math
from dataclasses import dataclass

import torch

from spmdzero.backend.torch_xla.mesh import DeviceMesh, fresh
from spmdzero.plan import Placement


@dataclass(frozen=True, kw_only=True)
class MeshTensor:
    """The `WholeTensor` of one parameter's stored form.

    Attributes:
        mesh: where its shards live.
        placement: how they are stored.
        shape: the parameter's own shape.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: tuple[int, ...]

    def sum(self, stored: torch.Tensor) -> torch.Tensor:
        """The total over all shards, padding left out: one all-reduce of a scalar."""
        elements = math.prod(self.shape)
        if stored.numel() != elements:
            # Padding is no parameter: an update may be anything there, 0 / 0 too.
            place = torch.arange(stored.numel(), device=stored.device)
            stored = torch.where(place < elements, stored, torch.zeros_like(stored))
        return self.mesh.mark(stored.sum())

    def gather(self, stored: torch.Tensor) -> torch.Tensor:
        """The tensor `[*shape]` on every device: one all-gather in `stored`'s dtype."""
        spec = self.placement.partition_spec(self.shape, self.mesh.spec)
        # Unmarked, the compiler could gather the operands of `stored` instead, in fp32.
        return self.mesh.gather(self.mesh.mark(stored, spec), self.placement, self.shape)

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[*shape]` in the form of the shards: each device keeps its own part."""
        # Unmarked, the compiler spreads what made `tensor` over the devices, and each of Muon's
        # matrix products becomes an all-reduce.
        return self.mesh.store(self.mesh.mark(fresh(tensor)), self.placement)
