"""Computations of a host's own rows: they run as a program on that host's devices alone.

No other host takes part, so that hosts may run different programs, of different shapes and number,
as hosts do whose rows don't end together.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdzero.backend.jax.hosts import _own
from spmdzero.backend.jax.lazy._values import Space, Value


def apart(roots: Iterable[Value]) -> list[Value]:
    """The values of `roots` that this host's devices can compute alone, from what they hold.

    An operation that other roots need too stays with them, or it would run twice.
    """
    alone: dict[int, bool] = {}
    everything = list(roots)
    found = [root for root in everything if root.space is Space.HOST and _is_alone(root, alone)]
    while found:
        mine = {id(root) for root in found}
        shared = _nodes_behind([root for root in everything if id(root) not in mine])
        kept = [root for root in found if not _nodes_behind([root]) & shared]
        if len(kept) == len(found):
            break
        found = kept
    return found


def _nodes_behind(roots: Sequence[Value]) -> set[int]:
    """Ids of the host operations behind `roots`."""
    nodes = {id(node): node for root in roots if (node := root.node) is not None}
    stack = list(nodes.values())
    while stack:
        for value in stack.pop().values:
            if value.node is not None and id(value.node) not in nodes:
                nodes[id(value.node)] = value.node
                stack.append(value.node)
    return {key for key, node in nodes.items() if node.space is Space.HOST}


def _is_alone(root: Value, known: dict[int, bool]) -> bool:
    """Whether `root` comes from own and replicated values alone, by operations without a mesh."""
    stack = [root]
    while stack:
        value = stack[-1]
        if id(value) in known:
            stack.pop()
            continue
        node = value.node
        if node is None:
            known[id(value)] = value.space is Space.HOST or value.array.is_fully_replicated
        elif node.op.makes is not None or value.space is Space.REPLICA:
            known[id(value)] = False
        else:
            unknown = [given for given in node.values if id(given) not in known]
            stack += unknown
            if not unknown:
                known[id(value)] = all(known[id(given)] for given in node.values)
    return known[id(root)]


@functools.cache
def mesh_of_host(mesh: Mesh) -> Mesh:
    """This host's devices of `mesh`."""
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return Mesh(np.array(mine), ("device",))


def as_held(leaves: Sequence[Value], mesh: Mesh) -> list[jax.Array]:
    """The parts of `leaves` on this host's devices, as their arrays; copies those of one device."""
    own = mesh_of_host(mesh)
    found = []
    for leaf in leaves:
        shape = leaf.array.shape
        if leaf.space is Space.HOST:
            shape = _own.kept_shape(leaf.shape, 1)
            how = _own.sharding(leaf.shape, own)
        else:
            how = NamedSharding(own, PartitionSpec())
        if len(leaf.array.addressable_shards) < own.size:
            # A value computed from nothing, such as torch.zeros, is on one device.
            found.append(jax.device_put(leaf.array, how))
        else:
            found.append(_rejoined(leaf.array, shape, how))
    return found


def as_known(value: Value, array: jax.Array, mesh: Mesh) -> jax.Array:
    """The array of all hosts, of which `array` is the part that this host has computed."""
    shape = _own.kept_shape(value.shape, _own.hosts_of(mesh))
    return _rejoined(array, shape, _own.sharding(value.shape, mesh))


def _rejoined(array: jax.Array, shape: Sequence[int], how: Any) -> jax.Array:
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(tuple(shape), how, parts)
