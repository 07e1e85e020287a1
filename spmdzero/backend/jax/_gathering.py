"""The operations on lazy tensors that stage 3 needs: see `spmdzero.backend.replica.Gathering`."""

import dataclasses
from typing import Any

import jax
import torch

from spmdzero.backend.jax._dispatch import own_value, value_of
from spmdzero.backend.jax._graph import in_order
from spmdzero.backend.jax._operations import MeshOp
from spmdzero.backend.jax._slice import within_sharing
from spmdzero.backend.jax._tensor import LazyTensor, alias_of, meta_of, over
from spmdzero.backend.jax._values import Space, record
from spmdzero.backend.jax.arrays import write_stamp
from spmdzero.backend.jax.mesh import DeviceMesh


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
