"""Memory of the host that programs of the devices read and write: what rests there, and moves."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.jax._operations import MeshOp
from spmdzero.backend.jax._values import Space

ON_HOST = "pinned_host"
"""What JAX calls memory of the host that devices read and write by themselves."""
ON_DEVICE = "device"


def rests_on_host(sharding: Any) -> bool:
    """Whether arrays of a sharding of JAX's are in the host's memory."""
    return getattr(sharding, "memory_kind", None) == ON_HOST


def on_devices(array: jax.Array) -> jax.Array:
    """The array itself, or a copy in the devices' memory of what rests in the host's."""
    if not rests_on_host(array.sharding):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(ON_DEVICE))


def copied(array: jax.Array) -> jax.Array:
    """A copy in the same memory."""
    if not rests_on_host(array.sharding):
        return array.copy()
    return jax.device_put(on_devices(array), array.sharding)


@functools.cache
def programs_reach(mesh: jax.sharding.Mesh) -> bool:
    """Whether a program of these devices can leave its results in the host's memory.

    The smallest program that does so is compiled: XLA's CPU compiler of jax 0.7.1 says that it has
    such memory and fails.
    """
    device = mesh.devices.flat[0]
    if ON_HOST not in {memory.kind for memory in device.addressable_memories()}:
        return False
    if device.default_memory().kind != ON_DEVICE:
        return False
    kept = NamedSharding(mesh, PartitionSpec(mesh.axis_names), memory_kind=ON_HOST)
    given = jax.ShapeDtypeStruct((mesh.size, 8), jnp.float32, sharding=kept)

    def doubled(x: jax.Array) -> jax.Array:
        return jax.device_put(x, kept.with_memory_kind(ON_DEVICE)) * 2

    try:
        jax.jit(doubled, out_shardings=kept, donate_argnums=0).lower(given).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def keep(spec: tuple[Any, ...], mesh: jax.sharding.Mesh, key: tuple[Any, ...]) -> MeshOp:
    """The operation that has a tensor in the host's memory, split as `spec` says.

    Args:
        key: what sets operations of this mesh apart.
    """
    sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=ON_HOST)

    def kept(array: jax.Array) -> jax.Array:
        split = jax.lax.with_sharding_constraint(array, sharding.with_memory_kind(ON_DEVICE))
        return jax.device_put(split, sharding)

    return MeshOp(("mark", spec, ON_HOST, *key), kept, Space.GLOBAL, spec, mesh, ON_HOST)


def fetch(
    specs: Sequence[tuple[Any, ...]], mesh: jax.sharding.Mesh, key: tuple[Any, ...]
) -> MeshOp:
    """The operation that brings tensors to the devices, not before others are computed.

    Its inputs are a tensor for each of `specs`, and those that it waits for.
    """
    shardings = [NamedSharding(mesh, PartitionSpec(*spec), memory_kind=ON_DEVICE) for spec in specs]

    def fetched(*arrays: jax.Array) -> list[jax.Array]:
        if len(arrays) > len(specs):
            # Copies from the host need nothing, and would all begin at the start of the program.
            arrays = jax.lax.optimization_barrier(arrays)
        return [jax.device_put(a, to) for a, to in zip(arrays, shardings, strict=False)]

    return MeshOp((FETCH, tuple(specs), *key), fetched, Space.GLOBAL, mesh=mesh)


FETCH = "fetch"
"""First of the key of the operation that takes what is in the host's memory as it is."""
