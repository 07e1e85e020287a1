"""Questions about one tensor on the devices: see `spmdzero.backend.Arrays`."""

import functools
import math
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from jax.sharding import NamedSharding

from spmdzero.backend.jax._memory import rests_on_host
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.graph._graph import mark_of
from spmdzero.backend.jax.graph._indexed import indices_behind
from spmdzero.backend.jax.lazy import _dispatch, _host, _plain_autograd, _writes
from spmdzero.backend.jax.lazy._dispatch import value_of, values_of
from spmdzero.backend.jax.lazy._pending_block import StandIn
from spmdzero.backend.jax.lazy._python import mixing
from spmdzero.backend.jax.lazy._tensor import OWN, LazyTensor, over
from spmdzero.backend.jax.lazy._values import Space, Value
from spmdzero.backend.jax.mesh import ordered_shards
from spmdzero.backend.protocols._arrays import Form

PARAMETER = LazyTensor


def attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that users set on `tensor`, without those of a lazy tensor."""
    return {key: value for key, value in vars(tensor).items() if key not in OWN}


def is_mine(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on the devices."""
    # A `StandIn`, as a loop's block returns, becomes a lazy tensor later.
    return isinstance(tensor, LazyTensor | StandIn)


def mix_with_cpu() -> None:
    """Lets calls take tensors on the CPU beside those on the devices."""
    mixing.is_allowed = True


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The value of `tensor` as a CPU tensor, computed first if it is pending."""
    return _dispatch.read(tensor)


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a dispatch mode sees in the place of `tensor`: itself."""
    return tensor


def backward(tensors: Any, grads: Any = None, **named: Any) -> None:
    """`torch.autograd.backward`, in which function modes stay on."""
    _plain_autograd.backward(tensors, grads, **named)


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as an operation of the pending program, which can be annotated and donated."""
    return tensor.clone()


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor with the value of `tensor`, which autograd doesn't know."""
    return over(_dispatch.copied(value_of(tensor)))


def write_stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """A stamp that changes whenever `tensor` is written: in place, by a view, or by `.data`."""
    assert isinstance(tensor, LazyTensor)
    return tensor.cell.serial, tensor.cell.writes


def value_ids(tensors: Sequence[torch.Tensor]) -> list[Hashable]:
    """The id of each tensor's value, which a write changes."""
    return [value_of(tensor).serial for tensor in tensors]


def set_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes `tensor`, its views and the tensors detached from it hold the value of `value`."""
    _writes.write(tensor, value_of(value))


def replace(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives `tensor` alone the value of `other`."""
    assert isinstance(tensor, LazyTensor)
    _dispatch.replace(tensor, value_of(other))


def are_pending(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor is pending: the result of operations that have not been started."""
    return [isinstance(t, LazyTensor) and value_of(t).node is not None for t in tensors]


def memory_of(tensor: torch.Tensor) -> "weakref.ref[Value]":
    """An id of the memory of `tensor`, for `is_kept_beside`."""
    return weakref.ref(value_of(tensor))


def is_kept_beside(memory: "weakref.ref[Value]", tensor: torch.Tensor) -> bool:
    """Whether `memory`, which `tensor` had before, still exists beside its new memory.

    It is donated unless a tensor holds the old value, whichever tensor has the new one.
    """
    value = memory()
    return value is not None and value is not value_of(tensor) and value.holders > 0


def shapes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor."""
    # Ask the values, which know them; torch would ask the tensor's class.
    return [(value.shape, value.dtype) for value in map(value_of, tensors)]


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    """Shape, dtype and sharding of each tensor."""
    # A step asks for all forms of its state. A program's results know them.
    return [value.form or form_of(value) for value in values_of(tensors)]


def form_of(value: Value) -> Form:
    """Shape, dtype and sharding of a global value."""
    sharding = sharding_in_jax(value)
    on_host = value.space is not Space.REPLICA and rests_on_host(sharding)
    written = _written(value, sharding) + " in the host's memory" * on_host
    form = value.shape, value.dtype, written
    if value.node is None:
        value.form = form
    return form


def are_on_host(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor rests in the host's memory."""
    return [_rests_on_host(value_of(tensor)) for tensor in tensors]


def _rests_on_host(value: Value) -> bool:
    return value.space is not Space.REPLICA and rests_on_host(sharding_in_jax(value))


def sharding_of(tensor: torch.Tensor) -> str:
    """The sharding of `tensor` as HLO writes it, ``''`` where it has none."""
    return _sharding_of(value_of(tensor))


def _sharding_of(value: Value) -> str:
    return _written(value, sharding_in_jax(value))


def _written(value: Value, sharding: Any) -> str:
    if value.space is Space.REPLICA:
        return "{manual}"
    return "" if sharding is None else hlo_sharding(sharding, len(value.shape))


def sharding_in_jax(value: Value) -> Any:
    """The sharding of a global value as JAX has it, None where it has none."""
    if value.sharding is not None:
        return value.sharding
    op = mark_of(value)
    return None if op is None else op.sharding


@functools.lru_cache
def hlo_sharding(sharding: Any, ndim: int) -> str:
    """A sharding as HLO writes it."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return "{replicated}"
    mesh, used, parts = sharding.mesh, list[str](), list[int]()
    for axes in (*sharding.spec, *(None,) * (ndim - len(sharding.spec))):
        names = () if axes is None else (axes,) if isinstance(axes, str) else axes
        used += names
        parts.append(math.prod(mesh.shape[name] for name in names))
    rest = [name for name in mesh.axis_names if name not in used]
    order = [mesh.axis_names.index(name) for name in (*used, *rest)]
    ids = np.arange(mesh.size).reshape(mesh.devices.shape).transpose(order).reshape(-1)
    last = math.prod(mesh.shape[name] for name in rest)
    tiles = [*parts, last] if last > 1 else parts
    listed = ",".join(map(str, ids))
    if list(ids) == list(range(mesh.size)):
        listed = f"<=[{mesh.size}]"
    suffix = " last_tile_dim_replicate" if last > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{listed}{suffix}}}"


def is_split(tensor: torch.Tensor) -> bool:
    """Whether devices may hold different parts of an annotated tensor."""
    return sharding_of(tensor) not in ("", "{replicated}")


def _array(tensor: torch.Tensor) -> Any:
    value = value_of(tensor)
    _host.compute(value)
    return value.array


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The shard of each device of this process, as a CPU tensor, computed first if pending."""
    value = value_of(tensor)
    with wide_numbers():
        return [
            _host.to_torch(np.asarray(shard.data), value.dtype)
            for shard in ordered_shards(_array(tensor))
        ]


def local_slices(tensor: torch.Tensor) -> list[tuple[slice, ...]]:
    """The slice of `tensor` that each shard holds; reads nothing back."""
    array = _array(tensor)
    return [
        tuple(
            slice(part.start or 0, length if part.stop is None else part.stop)
            for part, length in zip(shard.index, array.shape, strict=True)
        )
        for shard in ordered_shards(array)
    ]


def local_shapes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of the slices in `local_slices`."""
    return [tuple(part.stop - part.start for part in parts) for parts in local_slices(tensor)]


def local_replicas(tensor: torch.Tensor) -> list[int]:
    """Counts for each of `local_shards` the devices before its own that hold the same part."""
    return [shard.replica_id for shard in ordered_shards(_array(tensor))]


__all__ = [
    "PARAMETER", "apart", "are_on_host", "are_pending", "attributes", "fresh",
    "indices_behind", "inner", "is_kept_beside", "is_mine", "is_split",
    "local_replicas", "local_shapes", "local_shards", "local_slices", "memory_of", "read",
    "replace", "set_value", "shapes_of", "sharding_of", "value_ids", "write_stamp",
]  # fmt: skip
