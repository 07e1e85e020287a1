"""What the devices hold of one tensor: see `spmdzero.backend.Arrays`."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch_xla.distributed.spmd as xs

from spmdzero.backend.protocols._arrays import Form
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla._private import (
    are_pending,
    buffer_handles,
    is_split,
    local_replicas,
    local_shapes,
    local_slices,
    replace,
    set_value,
    sharding_of,
    write_stamp,
)

__all__ = [
    "PARAMETER",
    "are_on_host",
    "are_pending",
    "attributes",
    "buffer_handles",
    "forms_of",
    "fresh",
    "inner",
    "is_kept_beside",
    "is_mine",
    "is_split",
    "local_replicas",
    "local_shapes",
    "local_shards",
    "local_slices",
    "memory_of",
    "read",
    "replace",
    "set_value",
    "sharding_of",
    "value_ids",
    "write_stamp",
]


PARAMETER = torch.nn.Parameter


def attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What was set on `tensor` by its users."""
    return vars(tensor)


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells the memory of `tensor` apart, for `is_kept_beside`."""
    return _private.buffer_ids(tensor)


def is_kept_beside(memory: tuple[int, int], tensor: torch.Tensor) -> bool:
    """Whether `memory`, which was that of `tensor`, stays while its new value takes another.

    Once a program has run, memory is known by the tensor's own id, until then by that of the input.
    """
    _, reused = _private.buffer_ids(tensor)
    return reused not in memory


def is_mine(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on the devices."""
    return tensor.device.type == "xla"


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The value on the CPU, once it is computed."""
    return tensor.cpu()


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a dispatch mode sees in the place of `tensor`."""
    return torch._from_functional_tensor(tensor)


def backward(tensors: Any, grads: Any = None, **named: Any) -> None:
    """`torch.autograd.backward`; tensors of torch_xla's are no subclass."""
    torch.autograd.backward(tensors, grads, **named)


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    """Of each shape, dtype and sharding."""
    shapes, dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
    return list(zip(shapes, dtypes, _private.shardings_of(tensors), strict=True))


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is an operation of the pending program, free to be annotated.

    A `clone()` still stands for the buffer on the devices: annotating that differently moves it
    to the host and back, at every step.
    """
    return tensor | tensor if tensor.dtype == torch.bool else tensor * 1


def value_ids(tensors: Sequence[torch.Tensor]) -> list[Hashable]:
    """One for each tensor: the same as before where nothing was written into it."""
    # A value's name is an address, which may be a later value's once this one is gone.
    names = _private.output_ids(tensors)
    return [(name, write_stamp(tensor)) for name, tensor in zip(names, tensors, strict=True)]


def are_on_host(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """None is: see `runtime.host_memory`."""
    return [False for _ in tensors]


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each device of this process holds of `tensor`, as CPU tensors, after a sync."""
    runtime.wait()
    return [shard.data for shard in xs.XLAShardedTensor(tensor).local_shards]
