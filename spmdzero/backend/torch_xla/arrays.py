"""What the devices hold of one tensor: see `spmdzero.backend.Arrays`."""

from typing import Any

import torch
import torch_xla.distributed.spmd as xs

from spmdzero.backend.torch_xla import runtime
from spmdzero.backend.torch_xla._private import (
    are_pending,
    buffer_handles,
    buffer_ids,
    is_split,
    local_replicas,
    local_shapes,
    local_slices,
    replace,
    set_value,
    sharding_of,
    shardings_of,
    write_stamp,
)

__all__ = [
    "PARAMETER",
    "are_pending",
    "attributes",
    "buffer_handles",
    "buffer_ids",
    "fresh",
    "inner",
    "is_mine",
    "is_split",
    "local_replicas",
    "local_shapes",
    "local_shards",
    "local_slices",
    "read",
    "replace",
    "set_value",
    "sharding_of",
    "shardings_of",
    "write_stamp",
]


PARAMETER = torch.nn.Parameter


def attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What was set on `tensor` by its users."""
    return vars(tensor)


def is_mine(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on the devices."""
    return tensor.device.type == "xla"


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The value on the CPU, once it is computed."""
    return tensor.cpu()


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a dispatch mode sees in the place of `tensor`."""
    return torch._from_functional_tensor(tensor)


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is an operation of the pending program, free to be annotated.

    A `clone()` still stands for the buffer on the devices: annotating that differently moves it
    to the host and back, at every step.
    """
    return tensor | tensor if tensor.dtype == torch.bool else tensor * 1


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each device of this process holds of `tensor`, as CPU tensors, after a sync."""
    runtime.wait()
    return [shard.data for shard in xs.XLAShardedTensor(tensor).local_shards]
