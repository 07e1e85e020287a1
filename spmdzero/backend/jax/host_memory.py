"""Tensors and values in the host's memory: see `HostMemory` of the protocols.

Only programs for TPUs move values of the region. Other programs are the same without the moves.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as JaxSpec

from spmdzero.backend.jax._memory import ON_DEVICE, ON_HOST
from spmdzero.backend.jax._versions import is_for_tpu, moved
from spmdzero.backend.jax.graph._operations import FETCH, KEEP_ON_HOST, MeshOp
from spmdzero.backend.jax.lazy._dispatch import own_value, value_of
from spmdzero.backend.jax.lazy._tensor import LazyTensor, over
from spmdzero.backend.jax.lazy._values import Space, record
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.backend.protocols._mesh import Mesh, PartitionSpec


def keep(mesh: Mesh, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """Has `tensor` rest in the host's memory from now on, whatever is written into it."""
    assert isinstance(mesh, DeviceMesh)
    assert isinstance(tensor, LazyTensor)
    spec = tuple(spec or (None,) * tensor.dim())
    sharding = NamedSharding(mesh.devices, JaxSpec(*spec), memory_kind=ON_HOST)

    def kept(array: jax.Array) -> jax.Array:
        split = jax.lax.with_sharding_constraint(array, sharding.with_memory_kind(ON_DEVICE))
        return jax.device_put(split, sharding)

    key = ("mark", spec, ON_HOST, *mesh.key)
    tensor.cell.home = MeshOp(key, kept, Space.GLOBAL, spec, mesh.devices, ON_HOST)
    return mesh.mark(tensor, spec)


def fetch(
    mesh: Mesh,
    tensors: Sequence[torch.Tensor],
    specs: Sequence[PartitionSpec],
    *,
    after: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """The same in the devices' memory: they leave the host's once `after` is computed."""
    assert isinstance(mesh, DeviceMesh)
    shardings = [mesh.sharding(spec).with_memory_kind(ON_DEVICE) for spec in specs]

    def fetched(*arrays: jax.Array) -> list[jax.Array]:
        if len(arrays) > len(shardings):
            # Copies from the host need nothing, and would all begin at the start of the program.
            arrays = jax.lax.optimization_barrier(arrays)
        return [jax.device_put(a, to) for a, to in zip(arrays, shardings, strict=False)]

    key = (FETCH, tuple(tuple(spec) for spec in specs), *mesh.key)
    op = MeshOp(key, fetched, Space.GLOBAL, mesh=mesh.devices)
    values = tuple([own_value(tensor) for tensor in (*tensors, *after)])
    forms = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return [over(value) for value in record(op, values, {}, forms)]


@functools.cache
def programs_reach(mesh: jax.sharding.Mesh) -> bool:
    """Whether a program of these devices can leave its results in the host's memory.

    The smallest program that does so is compiled: XLA's CPU compiler of jax 0.7.1 says that it has
    such memory and fails.
    """
    device = mesh.local_devices[0]
    if ON_HOST not in {memory.kind for memory in device.addressable_memories()}:
        return False
    if device.default_memory().kind != ON_DEVICE:
        return False
    kept = NamedSharding(mesh, JaxSpec(mesh.axis_names), memory_kind=ON_HOST)
    given = jax.ShapeDtypeStruct((mesh.size, 8), jnp.float32, sharding=kept)

    def doubled(x: jax.Array) -> jax.Array:
        return jax.device_put(x, kept.with_memory_kind(ON_DEVICE)) * 2

    try:
        jax.jit(doubled, out_shardings=kept, donate_argnums=0).lower(given).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def missing() -> str:
    """Why the traced program moves nothing to the host's memory, ``""`` where it does."""
    if is_for_tpu():
        return ""
    on_cpu = jax.default_backend() == "cpu"
    return "the memory of CPU devices is the host's" if on_cpu else "only TPU programs move it"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The value of `tensor` in host memory, for `from_host` only; autograd records nothing."""
    return _recorded(MeshOp((KEEP_ON_HOST,), functools.partial(moved, host=True)), tensor)


def from_host(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The value that `to_host` was given, copied to the devices once `after` is computed."""
    return _recorded(MeshOp(("fetch from the host",), _fetched), tensor, after)


def _recorded(op: MeshOp, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    values = tuple(map(value_of, (tensor, *others)))
    return over(record(op, values, {}, [(values[0].shape, values[0].dtype)])[0])


def _fetched(array: Any, after: Any) -> Any:
    # Without the barrier the compiler starts the copy early, and the device holds it all along.
    held, _ = jax.lax.optimization_barrier((array, after))
    return moved(held, host=False)
