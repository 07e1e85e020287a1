"""Values that differ from host to host, as the rows that its script has loaded and their loss.

In a graph such a value is one array with a leading dim of all hosts, computed by `jax.vmap`.
Outside of graphs the hosts' values are stored one after the other in dim 0. So the rows of all
hosts, with which a module is called, are the very same array.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdzero.backend.hosts._watching import waiting
from spmdzero.backend.jax.axes._slice import batch_axes, replicas_of


@functools.cache
def hosts_of(mesh: Mesh) -> int:
    """The number of hosts whose devices are in `mesh`."""
    return len({device.process_index for device in mesh.devices.flat})


def sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """The sharding of an array that holds a part of `shape` of each host.

    The replicas of a host share its rows if they can; otherwise each holds the whole part.
    """
    hosts = hosts_of(mesh)
    if shape and shape[0] and shape[0] % (replicas_of(mesh) // hosts) == 0:
        return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    by_host = Mesh(mesh.devices.reshape(hosts, -1), ("host", "device"))
    return NamedSharding(by_host, PartitionSpec("host"))


def kept_shape(shape: Sequence[int], hosts: int) -> tuple[int, ...]:
    """The shape of the array that holds parts of `shape`."""
    return (hosts * shape[0], *shape[1:]) if shape else (hosts,)


def upload(part: np.ndarray, mesh: Mesh) -> jax.Array:
    """The array whose part on this host is `part`; called under `wide_numbers`."""
    rows = part if part.ndim else part[None]
    how = sharding(part.shape, mesh)
    return jax.make_array_from_process_local_data(how, rows, kept_shape(part.shape, hosts_of(mesh)))


def part_of(array: jax.Array, shape: Sequence[int]) -> np.ndarray:
    """This host's part of `shape`; other hosts need not call this."""
    length = shape[0] if shape else 1
    first = jax.process_index() * length
    part = np.empty((length, *shape[1:]), array.dtype)
    with waiting():
        for shard in array.addressable_shards:
            rows = shard.index[0]
            start = (rows.start or 0) - first
            part[start : start + shard.data.shape[0]] = np.asarray(shard.data)
    return part.reshape(shape)


def stacked(array: jax.Array, shape: Sequence[int], hosts: int) -> jax.Array:
    """An array that holds parts of `shape`, in the form of a graph: `[hosts, *shape]`."""
    return array.reshape(hosts, *shape)


def joined(array: jax.Array) -> jax.Array:
    """`[hosts, *shape]` in the stored form."""
    return array.reshape(kept_shape(array.shape[1:], array.shape[0]))


def rows_of(array: jax.Array, dim: int) -> jax.Array:
    """Each host's own rows of all hosts' rows in `dim`, `[hosts, *shape]`."""
    hosts = jax.process_count()
    shape = list(array.shape)
    shape[dim : dim + 1] = [hosts, shape[dim] // hosts]
    return jnp.moveaxis(array.reshape(shape), dim, 0)


def rows_of_all(array: jax.Array, dim: int) -> jax.Array:
    """The rows of all hosts in `dim`, from `[hosts, *shape]`."""
    moved = jnp.moveaxis(array, 0, dim)
    shape = list(moved.shape)
    shape[dim : dim + 2] = [math.prod(shape[dim : dim + 2])]
    return moved.reshape(shape)


def on_each_device(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Repeats `[hosts, *shape]` for each replica of a host, `[replicas, *shape]`."""
    times = replicas_of(mesh) // hosts_of(mesh)
    whole = jnp.repeat(array, times, axis=0)
    spread = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    return jax.lax.with_sharding_constraint(whole, spread)


def mean(array: jax.Array) -> jax.Array:
    """The mean over hosts of `[hosts, *shape]`; narrow dtypes are summed in fp32."""
    wide = jnp.promote_types(array.dtype, jnp.float32)
    return array.astype(wide).mean(0).astype(array.dtype)


def for_each(function: Any, arrays: Sequence[jax.Array], *, own: Sequence[bool]) -> Any:
    """Applies `function` for each host, to its part of the arrays that are `own`."""
    return jax.vmap(function, in_axes=[0 if mine else None for mine in own])(*arrays)
