"""Where one tensor lives on the mesh."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan._mesh import Axes, MeshSpec, entry_of, names_of

Shape = tuple[int, ...]
PartitionSpec = tuple[Axes | None, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the devices of a mesh hold one tensor.

    Attributes:
        kind: what the replicas hold. ``replicate``: each holds all of it. ``shard``: split along
            `dim`. ``flat``: flattened, padded to a multiple of the number of parts, and split.
            ``partial``: each holds its own whole summand; the tensor is their sum.
        dim: the tensor dim that is split over replicas; None unless `kind` is ``shard``.
        tensor_dim: the tensor dim that the devices of a replica split over the ``tensor`` axis;
            None where each of them has what the replica holds, as of a ``flat`` tensor. Where it is
            `dim` too, the parts over ``tensor`` are split over the replicas.
        reason: why the tensor has this placement, for people to read.
        over: the mesh axes that ``shard`` and ``flat`` split over.
    """

    kind: Literal["replicate", "shard", "flat", "partial"]
    dim: int | None = None
    tensor_dim: int | None = None
    reason: str
    over: Axes = "fsdp"

    def __post_init__(self) -> None:
        if (self.kind == "shard") != (self.dim is not None):
            raise SpmdZeroUsageError(
                f"placement {self.kind!r} with dim {self.dim}: a dim belongs to 'shard' and only it"
            )
        if self.kind == "flat" and self.tensor_dim is not None:
            raise SpmdZeroUsageError("a flat tensor isn't split over the tensor axis")
        if not self.reason:
            raise SpmdZeroUsageError(f"placement {self.kind!r} has no reason")

    @property
    def over_fsdp(self) -> bool:
        """Whether a replica holds only its part of the tensor (``shard`` or ``flat``)."""
        return self.kind in ("shard", "flat")

    @property
    def is_sharded(self) -> bool:
        """Whether a device holds only its part of the tensor, over whichever axis."""
        return self.over_fsdp or self.tensor_dim is not None

    def on_each_replica(self, *, reason: str) -> "Placement":
        """The placement of a tensor that each replica holds whole, and splits as this one."""
        return Placement(kind="replicate", tensor_dim=self.tensor_dim, reason=reason)

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
            SpmdZeroUsageError: `shape` has no dim `dim` or `tensor_dim`, or the number of parts
                doesn't divide it.
        """
        if self.kind == "flat":
            return (self.over,)
        axes: list[tuple[str, ...]] = [()] * len(shape)
        for dim, over in ((self.tensor_dim, "tensor"), (self.dim, self.over)):
            if dim is None:
                continue
            names = (*(axes[dim] if 0 <= dim < len(shape) else ()), *names_of(over))
            known = all(name in mesh.names for name in names)
            if not 0 <= dim < len(shape) or not known or shape[dim] % mesh.parts(names):
                raise SpmdZeroUsageError(
                    f"a tensor of shape {shape} can't be sharded on dim {dim} over "
                    f"{mesh.parts(names) if known else ' and '.join(names)} devices"
                )
            axes[dim] = names
        spec = tuple(map(entry_of, axes))
        return (entry_of(mesh.batch_axes), *spec) if self.kind == "partial" else spec

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
        """``R``, ``S(dim)``, ``F`` (with its padding: ``F(pad 91->96)``) or ``P``.

        ``T(dim)`` follows where the ``tensor`` axis splits it: ``S(1) T(0)``.
        """
        if self.kind == "flat":
            elements, (padded,) = math.prod(shape), self.stored_shape(shape, mesh)
            return "F" if padded == elements else f"F(pad {elements:,}->{padded:,})"
        over = {"shard": f"S({self.dim})", "partial": "P", "replicate": "R"}[self.kind]
        return over if self.tensor_dim is None else f"{over} T({self.tensor_dim})"
