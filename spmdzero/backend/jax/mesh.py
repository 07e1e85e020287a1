"""A JAX mesh for the plan's `MeshSpec`: placing, marking and crossing."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding

from spmdzero.backend.forms._quantized import LEAST, largest
from spmdzero.backend.jax._memory import rests_on_host
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.axes._slice import devices_by_host, within_sharing
from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.graph._graph import mark_of
from spmdzero.backend.jax.graph._operations import MeshOp, spec_in_jax
from spmdzero.backend.jax.hosts import _own
from spmdzero.backend.jax.hosts._across import JaxAcross
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._cells import require_same
from spmdzero.backend.jax.lazy._dispatch import own_value, value_of
from spmdzero.backend.jax.lazy._tensor import LazyTensor, over
from spmdzero.backend.jax.lazy._uploads import MOST_BYTES, Upload
from spmdzero.backend.jax.lazy._values import Space, Value, record
from spmdzero.backend.jax.lazy._writes import write
from spmdzero.backend.jax.ops.quantized import absmax, quantized
from spmdzero.backend.protocols._mesh import REPLICATED, PartitionSpec
from spmdzero.plan import Layout, MeshSpec, axes_of_region, names_of


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """The devices of a `MeshSpec`, in JAX's order.

    Attributes:
        spec: the named axes and their sizes.
    """

    spec: MeshSpec

    def __post_init__(self) -> None:
        compilations.mesh = self.devices
        compilations.meshes.add(self.devices)
        _host.traffic.place = self._put_whole
        if self.across is not None:
            _host.traffic.place_own = self._put_own

    @functools.cached_property
    def devices(self) -> jax.sharding.Mesh:
        """JAX's mesh, with the devices host by host."""
        devices = np.array(devices_by_host()[: self.spec.size]).reshape(self.spec.shape)
        return jax.sharding.Mesh(devices, self.spec.names)

    @property
    def key(self) -> tuple[Any, ...]:
        """Distinguishes the operations of this mesh from those of another."""
        return (self.spec.names, self.spec.shape)

    @property
    def size(self) -> int:
        """Number of devices in the mesh."""
        return self.spec.size

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas, each of which runs the model on its own rows."""
        return self.spec.replicas

    @functools.cached_property
    def across(self) -> JaxAcross | None:
        """See `Mesh`."""
        hosts = jax.process_count()
        return JaxAcross(self.devices, hosts) if hosts > 1 else None

    def batch_spec(self, ndim: int, dim: int = 0) -> PartitionSpec:
        """See `MeshSpec`."""
        return self.spec.batch_spec(ndim, dim)

    @functools.cached_property
    def _shardings(self) -> dict[PartitionSpec, NamedSharding]:
        return {}

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """JAX's sharding for a spec on this mesh."""
        if spec not in self._shardings:
            self._shardings[spec] = NamedSharding(self.devices, spec_in_jax(spec))
        return self._shardings[spec]

    def mark(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Annotates `tensor` in place and returns it."""
        spec = tuple(spec or (None,) * tensor.dim())
        assert isinstance(tensor, LazyTensor)
        value, home = value_of(tensor), tensor.cell.home
        op = self._constraint(spec) if home is None else home
        assert op.spec == spec
        self._keep_same(tensor)
        marked = mark_of(value)
        if marked is not None and marked.key == op.key:
            return tensor
        if (
            (sharding := value.sharding) is not None
            and value.space is not Space.REPLICA
            and sharding.is_equivalent_to(op.sharding, len(value.shape))
            and rests_on_host(sharding) == (home is not None)
        ):
            return tensor
        (annotated,) = record(op, (value,), {}, [(value.shape, value.dtype)])
        writes = tensor.cell.writes
        write(tensor, annotated)
        # An annotation changes no value.
        tensor.cell.writes = writes
        return tensor

    @functools.cached_property
    def _constraints(self) -> dict[PartitionSpec, MeshOp]:
        return {}

    def _constraint(self, spec: PartitionSpec) -> MeshOp:
        # A step marks each tensor of its state, most often as the one before did.
        if spec not in self._constraints:
            sharding = self.sharding(spec)

            def constrained(array: jax.Array) -> jax.Array:
                return jax.lax.with_sharding_constraint(array, sharding)

            key = ("mark", spec, *self.key)
            self._constraints[spec] = MeshOp(key, constrained, Space.GLOBAL, spec, self.devices)
        return self._constraints[spec]

    def _keep_same(self, tensor: LazyTensor) -> None:
        if self.across is not None:
            require_same(tensor.cell.value)
            tensor.cell.same = True

    def lay(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Annotates `tensor`, which is stored as `layout` says."""
        return self.mark(tensor, layout.spec)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Annotates `tensor`, which every device holds whole."""
        return self.mark(tensor, REPLICATED)

    def commit(self, old: torch.Tensor, new: torch.Tensor, spec: PartitionSpec) -> None:
        """Makes `old` hold `new`, annotated; no tensor holds the old value then: it is donated."""
        # Count a write, as autograd does for `old.copy_(new)`.
        write(old, value_of(new))
        torch.autograd.graph.increment_version(old)
        self.mark(old, spec)

    def enter(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """See `Mesh`."""
        spec = self._of_region(spec)
        value = own_value(tensor)
        require_same(value)
        shape = [
            length // self.spec.parts(axes) for length, axes in zip(tensor.shape, spec, strict=True)
        ]
        op = MeshOp(("enter", spec, *self.key), None, Space.REPLICA, spec, self.devices)
        return over(record(op, (value,), {}, [(shape, tensor.dtype)])[0])

    def leave(
        self, tensor: torch.Tensor, spec: PartitionSpec, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """The global tensor of `shape` whose shard on each replica is `tensor`."""
        inside = self._of_region(spec)
        op = MeshOp(("leave", inside, *self.key), None, Space.GLOBAL, inside, self.devices)
        whole = over(record(op, (own_value(tensor),), {}, [(shape, tensor.dtype)])[0])
        return whole if inside == tuple(spec) else self.mark(whole, spec)

    def _of_region(self, spec: PartitionSpec) -> PartitionSpec:
        """The axes in a spec by which the region divides a tensor."""
        return tuple(map(axes_of_region, spec))

    def reduce_scatter(
        self,
        local: torch.Tensor,
        *,
        axis: str,
        dim: int,
        steps: tuple[int, ...] = (),
        tensor_dim: int | None = None,
    ) -> torch.Tensor:
        """Sums over a mesh axis, and leaves each device its part of `dim`; in replica space.

        Args:
            steps: factors of the axis's length, one reduce-scatter for each; empty for one in all.
            tensor_dim: the dim that is and stays split over the axis ``tensor``; None for none.
        """
        length = self.spec.parts(axis)
        places = np.arange(length).reshape(steps or (length,))

        def scattered(array: jax.Array) -> jax.Array:
            for step, count in enumerate(places.shape):
                groups = np.moveaxis(places, step, -1).reshape(-1, count).tolist()
                array = jax.lax.psum_scatter(
                    array, axis, scatter_dimension=dim, axis_index_groups=groups, tiled=True
                )
            return array

        key = ("reduce_scatter", axis, dim, steps, tensor_dim)
        return self._scattered(local, scattered, key, length=length, dim=dim, tensor_dim=tensor_dim)

    def scatter_in_int8(
        self, local: torch.Tensor, *, axis: str, dim: int, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """See `Mesh`: an all-to-all of parts in int8, and of their scales."""
        length = self.spec.parts(axis)

        def scattered(array: jax.Array) -> jax.Array:
            parts = jnp.stack(jnp.split(array, length, axis=dim))
            size = absmax(parts, (-1,))
            few = quantized(parts, largest(torch.int8) / jnp.maximum(size, LEAST), torch.int8)
            few, unit = (
                jax.lax.all_to_all(each, axis, split_axis=0, concat_axis=0)
                for each in (few, size / largest(torch.int8))
            )
            return (few * unit).sum(axis=0).astype(array.dtype)

        key = ("scatter_in_int8", axis, dim, tensor_dim)
        return self._scattered(local, scattered, key, length=length, dim=dim, tensor_dim=tensor_dim)

    def _scattered(
        self,
        local: torch.Tensor,
        scatter: Callable[[jax.Array], jax.Array],
        key: tuple[Any, ...],
        *,
        length: int,
        dim: int,
        tensor_dim: int | None,
    ) -> torch.Tensor:
        """Records what leaves each of `length` devices its part of `dim`; `key` names it."""
        shape = list(local.shape)
        among = self._dim_of_sequence(shape, but=dim) if tensor_dim is None else None
        shape[dim] //= length
        within = within_sharing(scatter, {"tensor": tensor_dim, "sequence": among})
        op = MeshOp((*key, *self.key), within, Space.REPLICA, mesh=self.devices)
        return over(record(op, (own_value(local),), {}, [(shape, local.dtype)])[0])

    def _dim_of_sequence(self, shape: Sequence[int], *, but: int) -> int | None:
        """The dim by which devices that share rows add up a gradient, each a part of it."""
        parts = self.spec.sequence
        fits = [dim for dim, length in enumerate(shape) if dim != but and length % parts == 0]
        return max(fits, key=lambda dim: shape[dim]) if fits and parts > 1 else None

    def all_reduce(
        self, local: torch.Tensor, *, axis: str, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """The sum over a mesh axis, in replica space."""

        def summed(array: jax.Array) -> jax.Array:
            return jax.lax.psum(array, axis)

        key = ("all_reduce", axis, tensor_dim, *self.key)
        op = MeshOp(
            key, within_sharing(summed, {"tensor": tensor_dim}), Space.REPLICA, mesh=self.devices
        )
        return over(record(op, (own_value(local),), {}, [(tuple(local.shape), local.dtype)])[0])

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        """Every replica's tensor, `[n, *shape]`, on each device; in replica space."""
        axes = names_of(self.batch_spec(1)[0])

        def gathered(array: jax.Array) -> jax.Array:
            return jax.lax.all_gather(array, axes)

        op = MeshOp(("all_gather_rows", *self.key), gathered, Space.REPLICA, mesh=self.devices)
        shape = (self.replicas, *local.shape)
        return over(record(op, (own_value(local),), {}, [(shape, local.dtype)])[0])

    def sum_partial(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over dim 0 of a partial `[n, *shape]`, in its dtype, which crosses the wire.

        torch's sum would add bf16 in fp32, and the devices would send fp32.
        """
        op = MeshOp(("sum_partial",), _summed)
        shape = tuple(partial.shape[1:])
        return over(record(op, (own_value(partial),), {}, [(shape, partial.dtype)])[0])

    def place(
        self, host: torch.Tensor, spec: PartitionSpec = REPLICATED, *, waits: bool = False
    ) -> torch.Tensor:
        """Uploads a CPU tensor: each device receives only its own shard.

        With several hosts, `host` holds only this host's part of a tensor that is split.

        Args:
            waits: whether a small one may wait for the program that reads it.
        """
        array, spec = _host.to_numpy(host), spec or (None,) * host.dim()
        if waits and array.nbytes <= MOST_BYTES and jax.process_count() == 1:
            return self._placed(host, Upload(array, host.dtype, self.sharding(spec)))
        array = self._put(array, spec)
        return self._placed(host, Value(array.shape, host.dtype, Space.GLOBAL, array=array))

    def place_part(self, host: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Uploads a CPU tensor that every host has whole: each device receives only its shard."""
        if jax.process_count() == 1 or not any(spec):
            return self.place(host, spec)
        array = _host.to_numpy(host)
        with wide_numbers():
            parts = jax.make_array_from_callback(
                array.shape, self.sharding(spec), array.__getitem__
            )
        return self._placed(host, Value(parts.shape, host.dtype, Space.GLOBAL, array=parts))

    def _placed(self, host: torch.Tensor, value: Value) -> torch.Tensor:
        _host.note_upload(value)
        placed = over(value)
        self._keep_same(placed)
        wanted = host.requires_grad and torch.is_grad_enabled()
        return placed.requires_grad_() if wanted else placed

    def _put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        sharding = self.sharding(spec)
        with wide_numbers():
            if jax.process_count() > 1:
                return jax.make_array_from_process_local_data(sharding, array)
            return jax.device_put(array, sharding)

    def _put_own(self, array: np.ndarray) -> jax.Array:
        with wide_numbers():
            return _own.upload(array, self.devices)

    def _put_whole(self, array: np.ndarray) -> jax.Array:
        return self._put(array, (None,) * array.ndim)

    def place_all(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Uploads CPU tensors whole to every device, with the program that reads them."""
        return [self.place(host, waits=True) for host in hosts]

    def overwrite(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Overwrites the values of `tensor` on the devices; it stays the same tensor.

        Args:
            tensor: annotated, and computed.
            parts: CPU tensors of its dtype, one for each device of this process, in the order of
                `Arrays.local_slices`.
        """
        value = value_of(tensor)
        assert value.array is not None
        with wide_numbers():
            shards = [
                jax.device_put(_padded(_host.to_numpy(part), shard.data.shape), shard.data.sharding)
                for part, shard in zip(parts, ordered_shards(value.array), strict=True)
            ]
            array = jax.make_array_from_single_device_arrays(
                value.array.shape, value.array.sharding, shards
            )
        write(tensor, Value(value.shape, value.dtype, value.space, array=array))

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, spec: PartitionSpec
    ) -> torch.Tensor:
        """Zeros that are created as shards: no device ever holds the whole tensor."""
        return self.mark(torch.zeros(shape, dtype=dtype, device="xla"), spec)


def ordered_shards(array: jax.Array) -> list[Any]:
    """The array's shards on this process's devices, in the order of the devices."""
    return sorted(array.addressable_shards, key=lambda shard: shard.device.id)


def _summed(partial: jax.Array) -> jax.Array:
    zero = np.zeros((), partial.dtype)
    return jax.lax.reduce(partial, zero, jax.lax.add, (0,))


def _padded(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if part.shape == shape:
        return part
    return np.asarray(jnp.pad(part, [(0, b - a) for a, b in zip(part.shape, shape, strict=True)]))
