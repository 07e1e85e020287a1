"""Annotations: the devices' shards of a tensor, and entering and leaving manual sharding."""

from collections.abc import Sequence

import torch
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC as _C

OpSharding = _C.OpSharding
MANUAL = OpSharding([], [], [], xs.ShardingType.MANUAL)


def mark_sharding(tensor: torch.Tensor, op_sharding: OpSharding) -> None:
    """Annotates `tensor` in place."""
    _C._xla_mark_sharding(tensor, op_sharding)


def sharding_of(tensor: torch.Tensor) -> str:
    """The sharding of `tensor` as HLO writes it, ``''`` where it has none."""
    return _C._get_xla_sharding_spec(tensor)


def shardings_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The result of `sharding_of` for each tensor, in one call."""
    return _C._get_xla_sharding_specs(list(tensors))


def is_split(tensor: torch.Tensor) -> bool:
    """Whether devices may hold different parts of an annotated tensor."""
    return _C._get_xla_sharding_type(tensor) not in (
        xs.ShardingType.REPLICATED,
        xs.ShardingType.MAXIMAL,
        None,
    )


def is_manual(tensor: torch.Tensor) -> bool:
    """Whether a computed tensor belongs to manual sharding, where each device has its own."""
    return sharding_of(tensor) == "{manual}"


def local_slices(tensor: torch.Tensor) -> list[tuple[slice, ...]]:
    """The slice of an annotated tensor that each local device holds, without padding.

    The slices are in the order of `local_devices`; nothing is read from the devices.
    """
    whole = tuple(slice(0, length) for length in tensor.shape)
    found = _C._get_local_shard_replica_and_indices([tensor])[0]
    return [
        whole if parts is Ellipsis else tuple(slice(part.start, part.stop) for part in parts)
        for _, parts in found
    ]


def local_shapes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of the slices in `local_slices`."""
    return [tuple(part.stop - part.start for part in parts) for parts in local_slices(tensor)]


def local_replicas(tensor: torch.Tensor) -> list[int]:
    """Counts for each local device the devices before it that hold the same part of `tensor`."""
    return [replica for replica, _ in _C._get_local_shard_replica_and_indices([tensor])[0]]


def overwrite(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Overwrites the local devices' shards of a split tensor with CPU tensors.

    The tensor stays the same one: with another id, the next step would be another program.
    """
    _C._load_local_shards(tensor, list(parts), local_devices())


def local_devices() -> list[str]:
    """Names of the devices that this process drives, such as ``TPU:0``."""
    return _C._xla_get_runtime_devices()


def full_to_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Enters manual sharding: this device's shard of an annotated global tensor."""
    return _C._spmd_full_to_shard_shape(tensor)


def shard_to_full(
    tensor: torch.Tensor, op_sharding: OpSharding, shape: Sequence[int]
) -> torch.Tensor:
    """Leaves manual sharding: the global tensor of `shape` whose shards are `tensor`."""
    _C._mark_manual_sharding(tensor, MANUAL)
    return _C._spmd_shard_to_full_shape(tensor, op_sharding, torch.Size(shape), tensor.dtype)


def reduce_scatter(
    tensor: torch.Tensor, *, dim: int, count: int, groups: list[list[int]]
) -> torch.Tensor:
    """The sum over each group of devices, split along `dim`; inside manual sharding only."""
    return _C._xla_spmd_reduce_scatter("sum", tensor, 1.0, dim, count, groups)


def all_reduce(tensor: torch.Tensor, *, groups: list[list[int]]) -> torch.Tensor:
    """The sum over each group of devices; inside manual sharding only."""
    return _C._xla_spmd_all_reduce("sum", tensor, 1.0, groups)
