"""The groups of devices in a collective, and the bytes that leave their hosts."""

import functools
import math
import re
from collections import Counter

import numpy as np

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.hlo._module import Instruction, Module

_LISTED = re.compile(r"\breplica_groups=\{(\{[\d,{}\s]*\})\}")
# An array of all devices in order, reshaped, transposed, and cut into groups.
_COUNTED = re.compile(r"\breplica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# A mesh, and the mesh axes that a group spans: newer compilers write the groups that they make
# themselves in this form.
_AXES = re.compile(r"\breplica_groups=mesh\[([^\]]*)\] \{('[^':{}]*'(?:,'[^':{}]*')*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_NONE = "replica_groups={}"
_PAIRS = re.compile(r"\bsource_target_pairs=\{(.*?)\}\}")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")

Groups = tuple[tuple[int, ...], ...]


def groups_of(module: Module, collective: Instruction) -> Groups:
    """The devices of each group, by their places in the program's own order.

    For a ``collective-permute`` these are the pairs of source and target.

    Raises:
        SpmdZeroUsageError: all devices take part and the header doesn't count them, or the form
            of the groups is not known here.
    """
    return groups_in(collective.attributes) or (tuple(range(_devices(module, collective))),)


def groups_in(text: str) -> Groups:
    """The groups that the text of a collective lists; empty where all devices take part.

    Raises:
        SpmdZeroUsageError: the form of the groups is not known here.
    """
    if pairs := _PAIRS.search(text):
        return _listed(pairs[1] + "}")
    if groups := _LISTED.search(text):
        return _listed(groups[1])
    if groups := _COUNTED.search(text):
        return _counted(*groups.groups())
    if groups := _AXES.search(text):
        return _of_axes(*groups.groups())
    if (start := text.find("replica_groups=")) >= 0 and not text.startswith(_NONE, start):
        raise SpmdZeroUsageError(
            f"the HLO has a collective whose groups can't be read: {text[start : start + 80]!r}. "
            "Known are lists of devices, [groups,size]<=[devices], and whole axes of a mesh whose "
            "devices are in order"
        )
    return ()


def group_size(module: Module, collective: Instruction) -> int:
    """Number of devices that take part together; for a ``collective-permute`` those in a pair.

    Raises:
        SpmdZeroUsageError: as `groups_of`.
    """
    groups = groups_of(module, collective)
    if collective.opcode.startswith("collective-permute"):
        return len({device for pair in groups for device in pair})
    return len(groups[0])


def within(module: Module, collective: Instruction, count: int) -> bool:
    """Whether each group is within `count` neighbours, the devices of a mesh's last axis."""
    groups = groups_of(module, collective)
    return all(len({device // count for device in group}) == 1 for group in groups)


def _devices(module: Module, collective: Instruction) -> int:
    if found := _PARTITIONS.search(module.header):
        return int(found[1])
    raise SpmdZeroUsageError(
        f"the HLO does not say how many devices %{collective.name} spans: it has no replica "
        "groups and the header no num_partitions. Pass the SPMD-partitioned module."
    )


def sent_by_a_host(
    module: Module, collective: Instruction, *, kind: str, payload: int, wire: int, hosts: int
) -> int:
    """The most bytes of a collective that one host sends to other hosts.

    A ring visits one host after another: in each group one device of a host sends to another
    host, the same number of bytes as any device of the ring. In an all-to-all each device sends
    its part to each other device.

    Args:
        kind: of the collective.
        payload: `Collective.bytes`.
        wire: `Collective.wire_bytes`.
        hosts: number of hosts, over which the devices are spread evenly, host after host.
    """
    if hosts == 1:
        return 0
    each = _devices(module, collective) // hosts
    sent: Counter[int] = Counter()
    for group in groups_of(module, collective):
        members = Counter(device // each for device in group)
        if kind == "collective-permute":
            source, target = (device // each for device in group)
            sent[source] += payload if source != target else 0
            continue
        for host, mine in members.items():
            others = len(group) - mine
            part = mine * others * payload // len(group) if kind == "all-to-all" else wire
            sent[host] += part if others else 0
    return max(sent.values(), default=0)


@functools.lru_cache(maxsize=256)
def _listed(text: str) -> Groups:
    return tuple(
        tuple(int(device) for device in group.split(","))
        for group in re.findall(r"\{([\d,]+)\}", text.replace(" ", ""))
    )


@functools.lru_cache(maxsize=256)
def _counted(count: str, size: str, dims: str, order: str | None) -> Groups:
    shape = [int(dim) for dim in dims.split(",")]
    devices = np.arange(math.prod(shape)).reshape(shape)
    if order is not None:
        devices = devices.transpose([int(dim) for dim in order.split(",")])
    return tuple(map(tuple, devices.reshape(int(count), int(size)).tolist()))


@functools.lru_cache(maxsize=256)
def _of_axes(mesh: str, axes: str) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    chosen = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", axes)]
    others = [place for place in range(len(sizes)) if place not in chosen]
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    size = math.prod(devices.shape[place] for place in chosen)
    return tuple(map(tuple, devices.transpose([*others, *chosen]).reshape(-1, size).tolist()))
