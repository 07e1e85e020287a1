"""Where one tensor of a training state lives: a placement of one shape on one mesh."""

from dataclasses import dataclass
from functools import cached_property

from spmdzero.plan._mesh import MeshSpec
from spmdzero.plan._placement import PartitionSpec, Placement, Shape


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The form in which a tensor is stored, and which part of it each device holds.

    Attributes:
        placement: the form (whole, shard, flat or partial), with the reason.
        shape: the tensor's own shape.
        mesh: the devices.
        on_host: whether each device's part is in its host's memory.
    """

    placement: Placement
    shape: Shape
    mesh: MeshSpec
    on_host: bool = False

    @property
    def kind(self) -> str:
        """The placement's kind, see `Placement`."""
        return self.placement.kind

    @property
    def is_sharded(self) -> bool:
        """Whether a device holds only its part of the tensor, see `Placement`."""
        return self.placement.is_sharded

    @property
    def over_fsdp(self) -> bool:
        """Whether a replica holds only its part of the tensor, see `Placement`."""
        return self.placement.over_fsdp

    @cached_property
    def stored(self) -> Shape:
        """The global shape in which the tensor is stored, see `Placement.stored_shape`."""
        return self.placement.stored_shape(self.shape, self.mesh)

    @cached_property
    def spec(self) -> PartitionSpec:
        """The mesh axes that split each dim of `stored`; None for a dim that isn't split."""
        return self.placement.partition_spec(self.shape, self.mesh)

    @cached_property
    def local(self) -> Shape:
        """The shape of the part that one device holds; the same on every device."""
        return self.placement.local_shape(self.shape, self.mesh)
