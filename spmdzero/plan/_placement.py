"""Where one tensor lives on the mesh."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan._mesh import Axes, MeshSpec, names_of

Shape = tuple[int, ...]
PartitionSpec = tuple[Axes | None, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the devices of a mesh hold one tensor.

    Attributes:
        kind: ``replicate``: every device holds all of it. ``shard``: split along `dim`. ``flat``:
            flattened, padded to a multiple of the number of parts, and split. ``partial``: each
            device holds its own whole summand; the tensor is their sum.
        dim: the tensor dim that is split; None unless `kind` is ``shard``.
        reason: why the tensor has this placement, for people to read.
        over: the mesh axes that ``shard`` and ``flat`` split over.
    """

    kind: Literal["replicate", "shard", "flat", "partial"]
    dim: int | None = None
    reason: str
    over: Axes = "fsdp"

    def __post_init__(self) -> None:
        if (self.kind == "shard") != (self.dim is not None):
            raise SpmdZeroUsageError(
                f"placement {self.kind!r} with dim {self.dim}: a dim belongs to 'shard' and only it"
            )
        if not self.reason:
            raise SpmdZeroUsageError(f"placement {self.kind!r} has no reason")

    @property
    def is_sharded(self) -> bool:
        """Whether a device holds only its part of the tensor (``shard`` or ``flat``)."""
        return self.kind in ("shard", "flat")

    def stored_shape(self, shape: Shape, mesh: MeshSpec) -> Shape:
        """The global shape in which a tensor of `shape` is stored.

        ``flat`` gives ``[padded]``, ``partial`` gives ``[replicas, *shape]``, the others `shape`.
        """
        if self.kind == "flat":
            parts = mesh.parts(self.over)
            return (math.ceil(math.prod(shape) / parts) * parts,)
        if self.kind == "partial":
            return (mesh.replicas, *shape)
        return shape

    def partition_spec(self, shape: Shape, mesh: MeshSpec) -> PartitionSpec:
        """The mesh axes that split each dim of the stored shape; None for a dim that isn't split.

        Raises:
            SpmdZeroUsageError: `shape` has no dim `dim`, or the number of parts doesn't divide it.
        """
        whole = (None,) * len(shape)
        if self.kind == "flat":
            return (self.over,)
        if self.kind == "partial":
            return (mesh.names if len(mesh.names) > 1 else mesh.names[0], *whole)
        if self.dim is None:
            return whole
        parts = mesh.parts(self.over)
        if not 0 <= self.dim < len(shape) or shape[self.dim] % parts:
            raise SpmdZeroUsageError(
                f"a tensor of shape {shape} can't be sharded on dim {self.dim} over {parts} devices"
            )
        return (*whole[: self.dim], self.over, *whole[self.dim + 1 :])

    def local_shape(self, shape: Shape, mesh: MeshSpec) -> Shape:
        """The shape of the part that one device holds; the same on every device.

        Raises:
            SpmdZeroUsageError: as `partition_spec`.
        """
        stored, spec = self.stored_shape(shape, mesh), self.partition_spec(shape, mesh)
        return tuple(
            length // mesh.parts(entry) for length, entry in zip(stored, spec, strict=True)
        )

    def owned_slices(self, shape: Shape, mesh: MeshSpec) -> tuple[tuple[slice, ...], ...]:
        """The slices of the stored tensor that each device holds, in mesh order (row-major).

        Raises:
            SpmdZeroUsageError: as `partition_spec`.
        """
        spec, local = self.partition_spec(shape, mesh), self.local_shape(shape, mesh)
        owned = []
        for coordinates in itertools.product(*(range(size) for size in mesh.shape)):
            position = dict(zip(mesh.names, coordinates, strict=True))
            slices = []
            for length, entry in zip(local, spec, strict=True):
                index = 0
                for axis in names_of(entry):
                    index = index * dict(mesh.axes)[axis] + position[axis]
                slices.append(slice(index * length, (index + 1) * length))
            owned.append(tuple(slices))
        return tuple(owned)

    def short(self, shape: Shape, mesh: MeshSpec) -> str:
        """``R``, ``S(dim)``, ``F`` (with its padding: ``F(pad 91->96)``) or ``P``."""
        if self.kind == "shard":
            return f"S({self.dim})"
        if self.kind == "flat":
            elements, (padded,) = math.prod(shape), self.stored_shape(shape, mesh)
            return "F" if padded == elements else f"F(pad {elements:,}->{padded:,})"
        return "P" if self.kind == "partial" else "R"
