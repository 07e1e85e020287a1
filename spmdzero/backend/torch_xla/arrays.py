"""Questions about one tensor on the devices: see `spmdzero.backend.Arrays`."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch_xla.distributed.spmd as xs

from spmdzero.backend.forms._indices import IndexRange
from spmdzero.backend.protocols._arrays import Form
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla._private import (
    are_pending,
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
    "apart",
    "are_on_host",
    "are_pending",
    "attributes",
    "forms_of",
    "fresh",
    "indices_behind",
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
    """The attributes that users set on `tensor`."""
    return vars(tensor)


def indices_behind(tensor: torch.Tensor) -> list[tuple[torch.Tensor, IndexRange, str]]:
    """Nothing: torch_xla doesn't list what is pending."""
    return []


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """An id of the memory of `tensor`, for `is_kept_beside`."""
    return _private.buffer_ids(tensor)


def is_kept_beside(memory: tuple[int, int], tensor: torch.Tensor) -> bool:
    """Whether `memory`, which `tensor` had before, still exists beside its new memory.

    Memory has the id of the tensor itself once a program has run, and that of the input until then.
    """
    _, reused = _private.buffer_ids(tensor)
    return reused not in memory


def is_mine(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on the devices."""
    return tensor.device.type == "xla"


def mix_with_cpu() -> None:
    """Does nothing: torch_xla uploads such a tensor by itself."""


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The value of `tensor` as a CPU tensor, computed first if it is pending."""
    return tensor.cpu()


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a dispatch mode sees in the place of `tensor`."""
    return torch._from_functional_tensor(tensor)


def backward(tensors: Any, grads: Any = None, **named: Any) -> None:
    """`torch.autograd.backward`; torch_xla's tensors are no subclass."""
    torch.autograd.backward(tensors, grads, **named)


def shapes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    """Shape, dtype and sharding of each tensor."""
    shapes, dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
    return list(zip(shapes, dtypes, _private.shardings_of(tensors), strict=True))


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor with the value of `tensor`, which autograd doesn't know."""
    return tensor.detach().clone()


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as an operation of the pending program, which can be annotated.

    A `clone()` still stands for the buffer on the devices: a different annotation of it moves it
    to the host and back, at every step.
    """
    return tensor | tensor if tensor.dtype == torch.bool else tensor * 1


def value_ids(tensors: Sequence[torch.Tensor]) -> list[Hashable]:
    """The id of each tensor's value, which a write changes."""
    # A value's name is an address, which a later value may take when this one is gone.
    names = _private.output_ids(tensors)
    return [(name, write_stamp(tensor)) for name, tensor in zip(names, tensors, strict=True)]


def are_on_host(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """None is: see `runtime.host_memory`."""
    return [False for _ in tensors]


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The shard of each device of this process, as a CPU tensor; waits for the devices."""
    runtime.wait()
    return [shard.data for shard in xs.XLAShardedTensor(tensor).local_shards]
