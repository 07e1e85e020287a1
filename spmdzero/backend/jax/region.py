"""The replica region and the global forward, on JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from torch import nn

from spmdzero.backend.jax._around import JaxAround
from spmdzero.backend.jax.arrays import write_stamp
from spmdzero.backend.jax.axes._shared_rows import SharedRows
from spmdzero.backend.jax.axes._slice import within_sharing
from spmdzero.backend.jax.graph._graph import in_order
from spmdzero.backend.jax.graph._operations import MeshOp
from spmdzero.backend.jax.lazy._dispatch import own_value, value_of
from spmdzero.backend.jax.lazy._reads import watch_reads
from spmdzero.backend.jax.lazy._tensor import LazyTensor, alias_of, meta_of, over
from spmdzero.backend.jax.lazy._values import Space, record
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.backend.jax.scan import Scan
from spmdzero.backend.protocols._region import (
    AttentionChoice,
    GradientSink,
    LowPrecision,
    PartsOfGradients,
    Recompute,
    RegionRules,
    Wrote,
    ignore_writes,
)
from spmdzero.backend.replica import GatheredAtUse, GlobalForward, ReplicaRegion
from spmdzero.plan import Layout


def replica_region(
    *,
    mesh: DeviceMesh,
    module: nn.Module,
    sink: GradientSink,
    rules: RegionRules,
    seed: int = 1,
    autocast: torch.dtype | None = None,
    attention: AttentionChoice = "auto",
    scan: Scan = "off",
    recompute: Recompute = "nothing",
    keep_on_host: bool = False,
    products: LowPrecision | None = None,
    wrote: Wrote = ignore_writes,
    layouts: Mapping[str, Layout] | None = None,
    parts: Callable[[], PartsOfGradients] | None = None,
    in_int8: bool = False,
) -> ReplicaRegion:
    """A `ReplicaRegion`; autocast to products as in `JaxAround`, in_int8 as in `GatheredAtUse`."""
    watch_reads(mesh)
    around = JaxAround(
        module, autocast=autocast, attention=attention, scan=scan, recompute=recompute,
        keep_on_host=keep_on_host, products=products,
        rows=SharedRows(mesh) if mesh.spec.sequence > 1 else None,
    )  # fmt: skip
    gathered = None
    shards = {name: layout for name, layout in (layouts or {}).items() if layout.over_fsdp}
    if shards and parts:
        gathered = GatheredAtUse(
            mesh, shards, JaxGathering(mesh), parts, seed=seed, in_int8=in_int8
        )
    return ReplicaRegion(
        mesh=mesh, module=module, sink=sink, rules=rules, around=around, seed=seed, wrote=wrote,
        gathered=gathered, layouts=layouts or {},
    )  # fmt: skip


def global_forward(
    *, mesh: DeviceMesh, module: nn.Module, wrote: Wrote = ignore_writes, **around: Any
) -> GlobalForward:
    """A `GlobalForward`; autocast, attention and keep_on_host as in `JaxAround`."""
    watch_reads(mesh)
    made = JaxAround(module, mark=mesh.whole, **around)
    return GlobalForward(mesh=mesh, module=module, around=made, wrote=wrote)


@dataclasses.dataclass(frozen=True)
class JaxGathering:
    """Gathers shards, and finds the source of a view by their common cell.

    Attributes:
        mesh: the devices.
    """

    mesh: DeviceMesh

    def all_gather(
        self, local: torch.Tensor, *, axis: str, dim: int, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """See `Gathering`."""
        spec, shape = self.mesh.spec, list(local.shape)
        shape[dim] *= dict(spec.axes)[axis]

        def gathered(array: jax.Array) -> jax.Array:
            return jax.lax.all_gather(array, axis, axis=dim, tiled=True)

        gathered = within_sharing(gathered, {"tensor": tensor_dim})
        key = ("all_gather", axis, dim, tensor_dim, spec.names, spec.shape)
        op = MeshOp(key, gathered, Space.REPLICA, mesh=self.mesh.devices)
        return over(record(op, (own_value(local),), {}, [(shape, local.dtype)])[0])

    def source_of(self, tensor: Any) -> Any:
        """An object that identifies the tensor which `tensor` is or views, and lives as long."""
        return tensor.cell if isinstance(tensor, LazyTensor) else None

    def is_whole(self, tensor: Any) -> bool:
        """Whether `tensor` is its source itself, not a view of it."""
        return isinstance(tensor, LazyTensor) and not tensor.steps

    def viewed_as(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The same view of `whole` that `tensor` is of its source."""
        assert isinstance(tensor, LazyTensor)
        assert isinstance(whole, LazyTensor)
        if not tensor.steps:
            return whole
        return alias_of(whole, tensor.steps, meta_of(tensor), int(tensor.storage_offset()))

    def stand_in(self, whole: torch.Tensor) -> Any:
        """Leaves `whole` out of programs until its value is asked for; returns its source."""
        value = value_of(whole)
        value.on_demand = True
        for node in in_order(value, ()):
            for leaf in node.values:
                leaf.lasts = True
        return self.source_of(whole)

    def stamp(self, tensor: torch.Tensor) -> Any:
        """A value that changes when the source of `tensor` is written."""
        return write_stamp(tensor)

    def takes_view(self, func: Any) -> bool:
        """Whether the operation returns views of its first operand."""
        return func.is_view

    def note_view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Does nothing: a view has the cell of its source, and the steps from there."""
