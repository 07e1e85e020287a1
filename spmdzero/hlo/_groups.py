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
# A mesh, its devices where they aren't in order, and the mesh axes that a group spans: newer
# compilers write the groups that they make themselves in this form (xla/hlo/ir/mesh_and_axis.cc).
_SPANNED = r"'[^':{}]*'(?::\(\d+\)\d+)?"
_IDS = r"(?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))"
_AXES = re.compile(
    rf"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IDS}\))? "
    rf"\{{({_SPANNED}(?:,{_SPANNED})*)\}}"
)
_AXIS = re.compile(r"'([^']*)'=(\d+)")
# An axis, or what is left of it between `pre` devices outside and the rest inside.
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
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
            "Known are lists of devices, [groups,size]<=[devices], and the axes of a mesh"
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
    return tuple(map(tuple, _in_order(dims, order).reshape(int(count), int(size)).tolist()))


def _in_order(dims: str, order: str | None) -> np.ndarray:
    """All devices, reshaped to `dims`, and transposed by `order`."""
    shape = _numbers(dims)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices if order is None else devices.transpose(_numbers(order))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@functools.lru_cache(maxsize=256)
def _of_axes(
    mesh: str, dims: str | None, order: str | None, listed: str | None, axes: str
) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    # Each axis is cut into what is outside of the group's part of it, that part, and the inside.
    parts = {name: (1, 1, size) for name, size in sizes.items()}
    spanned: list[tuple[str, int]] = []
    for name, pre, size in _PART.findall(axes):
        outside, part = (int(pre), int(size)) if size else (1, sizes[name])
        if any(name == other for other, _ in spanned):
            raise SpmdZeroUsageError(f"the HLO has groups that span two parts of an axis: {axes}")
        parts[name] = (outside, part, sizes[name] // (outside * part))
        spanned.append((name, part))
    if listed is not None:
        devices = np.array(_numbers(listed))
    else:
        devices = np.arange(math.prod(sizes.values())) if dims is None else _in_order(dims, order)
    cut = devices.reshape([size for part in parts.values() for size in part])
    chosen = [3 * list(parts).index(name) + 1 for name, _ in spanned]
    others = [place for place in range(cut.ndim) if place not in chosen]
    size = math.prod(part for _, part in spanned)
    return tuple(map(tuple, cut.transpose([*others, *chosen]).reshape(-1, size).tolist()))
