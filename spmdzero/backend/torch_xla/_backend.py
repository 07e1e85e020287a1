"""torch_xla as a backend."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmdzero.backend._mesh import PartitionSpec
from spmdzero.backend.torch_xla import arrays, counters, flags, memory_maps, programs, runtime
from spmdzero.backend.torch_xla._boundary import refuse_leak
from spmdzero.backend.torch_xla._global import GlobalForward
from spmdzero.backend.torch_xla._norm import global_norm
from spmdzero.backend.torch_xla._reads import in_region
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.backend.torch_xla.recompute import recomputed
from spmdzero.backend.torch_xla.reduction import GradientReduction
from spmdzero.backend.torch_xla.region import ReplicaRegion
from spmdzero.plan import MeshSpec


class TorchXla:
    """`spmdzero.backend.Backend` over torch_xla's lazy tensors."""

    name, device_type = "torch_xla", "xla"
    runtime, arrays, programs = runtime, arrays, programs
    counters, flags, memory_maps = counters, flags, memory_maps

    def mesh(self, spec: MeshSpec) -> DeviceMesh:
        """The devices of `spec`."""
        return DeviceMesh(spec)

    def region(self, **how: Any) -> ReplicaRegion:
        """See `ReplicaRegion`."""
        return ReplicaRegion(**how)

    def global_forward(self, **how: Any) -> GlobalForward:
        """See `GlobalForward`."""
        return GlobalForward(**how)

    def reduction(self, **how: Any) -> GradientReduction:
        """See `GradientReduction`."""
        return GradientReduction(**how)

    def global_norm(
        self, tensors: Sequence[tuple[torch.Tensor, PartitionSpec]], mesh: Any
    ) -> torch.Tensor:
        """See `_norm`."""
        return global_norm(tensors, mesh)

    def in_region(self) -> bool:
        """Whether this thread runs what belongs to a replica."""
        return in_region()

    def refuse_leak(self, loss: torch.Tensor) -> None:
        """See `_boundary`."""
        refuse_leak(loss)

    def recomputed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `recompute`."""
        return recomputed(function, *args, **kwargs)
