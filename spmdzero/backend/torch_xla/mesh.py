"""A torch_xla mesh whose annotations are cached, made from the plan's backend-free description."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs

from spmdzero.backend.protocols._mesh import REPLICATED, PartitionSpec
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla.arrays import fresh
from spmdzero.plan import Layout, MeshSpec


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """The devices of a `MeshSpec`, in torch_xla's order.

    Attributes:
        spec: the named axes and their sizes.
    """

    spec: MeshSpec

    @functools.cached_property
    def xla(self) -> xs.Mesh:
        """The torch_xla mesh."""
        return xs.Mesh(np.arange(self.spec.size), self.spec.shape, self.spec.names)

    @functools.cached_property
    def _operations(self) -> dict[PartitionSpec, _private.OpSharding]:
        return {}

    @property
    def size(self) -> int:
        """Number of devices in the mesh."""
        return self.spec.size

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas, each of which runs the model on its own rows."""
        return self.spec.replicas

    @property
    def across(self) -> None:
        """None, because every tensor is the same on all hosts."""
        return None

    def operation(self, spec: PartitionSpec) -> _private.OpSharding:
        """The OpSharding of a partition spec, built once: building takes 278 µs, a lookup 0.1."""
        if spec not in self._operations:
            self._operations[spec] = self.xla.get_op_sharding(spec)
        return self._operations[spec]

    def batch_spec(self, ndim: int, dim: int = 0) -> PartitionSpec:
        """See `MeshSpec`."""
        return self.spec.batch_spec(ndim, dim)

    def mark(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Annotates `tensor` in place and returns it."""
        _private.mark_sharding(tensor, self.operation(spec or (None,) * tensor.dim()))
        return tensor

    def lay(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Annotates `tensor`, which is stored as `layout` says."""
        return self.mark(tensor, layout.spec)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Annotates `tensor`, which every device holds whole."""
        return self.mark(tensor, REPLICATED)

    def commit(self, old: torch.Tensor, new: torch.Tensor, spec: PartitionSpec) -> None:
        """Makes `old` hold `new`, annotated; in place, so that XLA reuses its buffer (donation)."""
        old.copy_(new)
        self.mark(old, spec)

    def enter(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """This device's shard of a global tensor: `[b, ...]` becomes `[b/n, ...]` over an axis."""
        return _private.full_to_shard(self.mark(fresh(tensor), spec))

    def leave(
        self, tensor: torch.Tensor, spec: PartitionSpec, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """The global tensor of `shape` whose shard on each device is `tensor`."""
        return _private.shard_to_full(tensor.clone(), self.operation(spec), shape)

    def reduce_scatter(
        self,
        local: torch.Tensor,
        *,
        axis: str,
        dim: int,
        steps: tuple[int, ...] = (),
        tensor_dim: int | None = None,
    ) -> torch.Tensor:
        """Sums over a mesh axis, and leaves each device its part of `dim`; in replica space."""
        for groups in self.groups(axis, steps):
            local = _private.reduce_scatter(local, dim=dim, count=len(groups[0]), groups=groups)
        return local

    def scatter_in_int8(self, local: torch.Tensor, **_: Any) -> NoReturn:
        """Never called: this backend has no `low_precision`."""
        raise NotImplementedError

    def all_reduce(
        self, local: torch.Tensor, *, axis: str, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """The sum over a mesh axis, in replica space."""
        (groups,) = self.groups(axis)
        return _private.all_reduce(local, groups=groups)

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        """Every replica's tensor, `[n, *shape]`, on each device; in replica space."""
        # GSPMD makes the gather.
        spec, shape = self.batch_spec(local.dim() + 1), (self.replicas, *local.shape)
        return self.enter(self.leave(local[None], spec, shape), (None,) * len(shape))

    def sum_partial(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over dim 0 of a partial `[n, *shape]`, in its dtype, which crosses the wire."""
        return partial.sum(0)

    def place(
        self, host: torch.Tensor, spec: PartitionSpec = REPLICATED, *, waits: bool = False
    ) -> torch.Tensor:
        """Uploads a CPU tensor: each device receives only its own shard.

        With several hosts, `host` holds only this host's part of a tensor that is split. `waits` is
        for backends whose programs take numbers of the host's.
        """
        spec = spec or (None,) * host.dim()
        split = any(axis is not None for axis in spec)
        sharding = xs.ShardingSpec(self.xla, spec, minibatch=split and runtime.process_count() > 1)
        uploaded: Any = xm.send_cpu_data_to_device(
            [host], runtime.device(), input_sharding=sharding
        )
        return uploaded[0]

    def place_part(self, host: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Uploads a CPU tensor that every host has whole, and then marks it."""
        return self.mark(self.place(host), spec) if any(spec) else self.place(host)

    def place_all(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Uploads CPU tensors whole to every device, those with equally many dims in one call."""
        placed: dict[int, torch.Tensor] = {}
        by_rank: dict[int, list[int]] = {}
        for index, host in enumerate(hosts):
            by_rank.setdefault(host.dim(), []).append(index)
        for rank, indices in by_rank.items():
            uploaded: Any = xm.send_cpu_data_to_device(
                [hosts[i] for i in indices],
                runtime.device(),
                input_sharding=xs.ShardingSpec(self.xla, (None,) * rank),
            )
            placed.update(zip(indices, uploaded, strict=True))
        return [placed[index] for index in range(len(hosts))]

    def overwrite(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Overwrites the values of `tensor` on the devices, which must not be pending.

        If the tensor is the same on all devices, this adds a copy to the pending program.

        Args:
            tensor: annotated; stays the same tensor, of the same dtype and sharding.
            parts: CPU tensors, one for each device of this process, in the order of
                `local_slices(tensor)`.
        """
        if _private.is_split(tensor):
            _private.overwrite(tensor, parts)
        else:
            tensor.copy_(self.place(parts[0]))
            self.whole(tensor)

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, spec: PartitionSpec
    ) -> torch.Tensor:
        """Zeros that are created as shards: no device ever holds the whole tensor."""
        return self.mark(torch.zeros(shape, dtype=dtype, device=runtime.device()), spec)

    def groups(self, axis: str, steps: tuple[int, ...] = ()) -> list[list[list[int]]]:
        """Groups of device ids that differ only in their place on `axis`, in one step or several.

        Args:
            axis: a name of the spec.
            steps: factors of the axis's length; empty for all of it at once.

        Returns the groups of each step. Reduce-scatters over them, one after another, leave each
        device the same part as one over the whole axis.
        """
        place = self.spec.names.index(axis)
        shape = self.spec.shape
        steps = steps or (shape[place],)
        ids = np.arange(self.size).reshape(*shape[:place], *steps, *shape[place + 1 :])
        return [
            np.moveaxis(ids, place + step, -1).reshape(-1, length).tolist()
            for step, length in enumerate(steps)
        ]
