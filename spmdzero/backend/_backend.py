"""One compiler's front end under the engine."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from spmdzero.backend._arrays import Arrays
from spmdzero.backend._mesh import Mesh, PartitionSpec, Reduction
from spmdzero.backend._programs import Counters, Flags, MemoryMaps, Programs
from spmdzero.backend._region import Forward, GradientSink, Region, RegionRules
from spmdzero.backend._runtime import Runtime
from spmdzero.plan import MeshSpec


class Backend(Protocol):
    """Everything that knows devices. It owns no rule of ZeRO, and none of DeepSpeed's."""

    @property
    def name(self) -> str:
        """The package that it stands on."""
        ...

    @property
    def device_type(self) -> str:
        """torch's name for the devices: of `tensor.device.type`, and for `torch.autocast`."""
        ...

    @property
    def runtime(self) -> Runtime:
        """Devices and processes."""
        ...

    @property
    def arrays(self) -> Arrays:
        """What the devices hold of a tensor."""
        ...

    @property
    def programs(self) -> Programs:
        """The text of programs."""
        ...

    @property
    def counters(self) -> Counters:
        """What was compiled and read."""
        ...

    @property
    def flags(self) -> Flags:
        """What the compilers are started with."""
        ...

    @property
    def memory_maps(self) -> MemoryMaps:
        """What compiled programs take of the process."""
        ...

    def mesh(self, spec: MeshSpec) -> Mesh:
        """The devices of `spec`."""
        ...

    def region(
        self,
        *,
        mesh: Mesh,
        module: nn.Module,
        sink: GradientSink,
        rules: RegionRules,
        seed: int = 1,
        autocast: torch.dtype | None = None,
    ) -> Region:
        """Runs `module` per device.

        Args:
            mesh: the devices; every axis carries the batch.
            module: its parameters and buffers live on the mesh, replicated.
            sink: called in backward with each trainable parameter's name and gradient.
            rules: declared exceptions to the rules of entering and leaving.
            seed: how many times the global loss's gradients those that reach `sink` are: 1, or the
                number of devices, with which each replica differentiates its own loss.
            autocast: dtype of `torch.autocast` around the module's forward, None for none.
        """
        ...

    def global_forward(
        self, *, mesh: Mesh, module: nn.Module, autocast: torch.dtype | None = None
    ) -> Forward:
        """Runs `module` on the whole batch: the compiler splits it."""
        ...

    def reduction(
        self,
        *,
        mesh: Mesh,
        method: Literal["annotated", "explicit"],
        dtype: torch.dtype | None = None,
    ) -> Reduction:
        """Sums gradients over the replicas.

        Args:
            mesh: the devices.
            method: whether the compiler chooses the collective, or is told.
            dtype: the dtype that crosses the wire, None for the gradient's own.
        """
        ...

    def global_norm(
        self, tensors: Sequence[tuple[torch.Tensor, PartitionSpec]], mesh: Mesh
    ) -> torch.Tensor:
        """The L2 norm over all elements of `tensors`, each with its sharding; 0-dim fp32."""
        ...

    def in_region(self) -> bool:
        """Whether this thread runs what belongs to a replica."""
        ...

    def refuse_leak(self, loss: torch.Tensor) -> None:
        """Raises ReplicaRegionError where `loss` is computed with what didn't leave a region."""

    def recomputed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `function`, keeps its inputs only, and runs it again in the backward pass."""
