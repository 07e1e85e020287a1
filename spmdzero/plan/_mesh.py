"""The shape of the device mesh, without devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spmdzero.errors import SpmdZeroConfigError

# The order of the mesh's axes: neighbours on the last axis are nearest in device order.
_AXIS_ORDER = ("data", "fsdp", "sequence", "tensor")
# The axes along which devices share one replica's work: the region leaves them to the compiler.
_SHARING = ("sequence", "tensor")

Axes: TypeAlias = str | tuple[str, ...]


def _refuse(value: object, *, reason: str, fix: str) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(key="spmd.mesh", value=value, reason=reason, fix=fix)


@dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of the mesh axes. The batch is split over ``data`` and ``fsdp``.

    Attributes:
        axes: (name, number of devices) per axis, in the order ``data``, ``fsdp``, ``sequence``,
            ``tensor``, of which only ``fsdp`` is always there. Devices along the last two share one
            replica's work: along ``sequence`` each has a part of every row, along ``tensor`` of the
            dims of weights that the plan says.
        states: the axes over which gradients, masters and moments are sharded: ``fsdp``, over which
            parameters are, so that ``data`` has copies of all; or ``("fsdp", "data")`` or
            ``("fsdp", "sequence")``, where a device has a part of its own part of the parameter.
    """

    axes: tuple[tuple[str, int], ...]
    states: Axes = "fsdp"

    def __post_init__(self) -> None:
        known = tuple(name for name in _AXIS_ORDER if name in self.names)
        if "fsdp" not in self.names or self.names != known:
            raise _refuse(
                self.names,
                reason="the mesh axes are 'fsdp', before it 'data' and behind it 'sequence' and "
                "'tensor', if wanted, each once",
                fix='Write {"fsdp": -1}, {"data": 2, "fsdp": -1} for two copies of the shards, '
                '{"fsdp": -1, "sequence": 2} for rows that two devices share, or '
                '{"fsdp": -1, "tensor": 2} for weights.',
            )
        for name, size in self.axes:
            if size < 1:
                raise _refuse(
                    dict(self.axes),
                    reason=f"axis {name!r} has {size} devices",
                    fix="Give every axis a size of at least 1.",
                )

    @classmethod
    def resolve(cls, axes: Mapping[str, int], *, device_count: int, group: int = 1) -> "MeshSpec":
        """The mesh that `axes` asks for on `device_count` devices; one size may be -1.

        Args:
            axes: name of an axis -> its size.
            device_count: number of devices of all hosts together.
            group: DeepSpeed's ``zero_hpz_partition_size`` at stage 3: so many devices, or all if
                there are fewer, share one copy of the parameters, and all devices the states; 0
                and 1 leave both to `axes`.

        Raises:
            SpmdZeroConfigError: an unknown axis, no ``fsdp`` axis, a size that is neither
                positive nor -1, more than one -1, sizes that don't multiply to `device_count`, or
                a `group` that doesn't fit the devices or the axes.
        """
        # Of one device such an axis splits nothing.
        asked = {name: n for name, n in axes.items() if not (name in _SHARING and n == 1)}
        sizes = {name: asked[name] for name in sorted(asked)}
        open_axes = [name for name, size in sizes.items() if size == -1]
        known = math.prod(size for size in sizes.values() if size != -1)
        if len(open_axes) == 1 and known > 0:
            sizes[open_axes[0]] = max(1, device_count // known)
        # Devices that share rows hold the same weights, and so have parts of their states each.
        mesh = cls(tuple(sizes.items()), ("fsdp", "sequence") if "sequence" in sizes else "fsdp")
        if mesh.size != device_count:
            raise _refuse(
                dict(axes),
                reason=f"the sizes multiply to {known}, there are {device_count} devices",
                fix=f"Choose sizes that divide {device_count}."
                if open_axes
                else f"Choose sizes whose product is {device_count}, or set one axis to -1.",
            )
        return mesh if group < 2 else mesh._in_groups(min(group, device_count))

    def _in_groups(self, group: int) -> "MeshSpec":
        reason = f"{group} doesn't divide the {self.size} devices" if self.size % group else ""
        if self.sharing:
            axis = " and ".join(self.sharing)
            reason = f"its groups and the axis {axis} together are not supported"
        if self.data > 1 and self.fsdp != group:
            reason = f"the mesh has groups of {self.fsdp} that share one copy of the parameters"
        if reason:
            raise SpmdZeroConfigError(
                key="zero_optimization.zero_hpz_partition_size",
                value=group,
                reason=reason,
                fix="Choose a divisor of the number of devices, and leave spmd.mesh out.",
            )
        if group == self.size:
            return self
        return MeshSpec((("data", self.size // group), ("fsdp", group)), ("fsdp", "data"))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices per axis, in the order of `names`."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas: each runs the model on rows of its own."""
        return self.data * self.fsdp

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the batch is split, and which the replica region divides."""
        return batch_axes(self.names)

    def batch_spec(self, ndim: int, dim: int = 0) -> tuple[Axes | None, ...]:
        """The spec of an `ndim`-dimensional tensor whose `dim` is split over the replicas."""
        rows = entry_of(self.batch_axes)
        return tuple(rows if i == dim else None for i in range(ndim))

    @property
    def fsdp(self) -> int:
        """Replicas that share one copy of the parameters, at stage 3."""
        return dict(self.axes)["fsdp"]

    @property
    def tensor(self) -> int:
        """Devices that share a replica's weights: 1 when the mesh has no ``tensor`` axis."""
        return dict(self.axes).get("tensor", 1)

    @property
    def sequence(self) -> int:
        """Devices that share each row of a replica: 1 when the mesh has no such axis."""
        return dict(self.axes).get("sequence", 1)

    @property
    def sharing(self) -> dict[str, int]:
        """Axis -> its devices, of the axes along which devices share one replica's work."""
        return {name: size for name, size in self.axes if name in _SHARING}

    @property
    def data(self) -> int:
        """Number of groups that each have a copy of the parameters; 1 without a ``data`` axis."""
        return dict(self.axes).get("data", 1)

    @property
    def shards(self) -> int:
        """Devices that share one copy of the states."""
        return self.parts(self.states)

    @property
    def states_of_region(self) -> Axes:
        """Those of `states` by which the region divides them; the compiler does the rest."""
        axes = axes_of_region(self.states)
        assert axes is not None
        return axes

    def parts(self, axes: Axes | None) -> int:
        """Number of parts of a dim that is split over `axes`."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in names_of(axes))

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        both = self.states != "fsdp"
        return f"{axes}, states over {' and '.join(names_of(self.states))}" if both else axes


def batch_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the axes of a mesh over which the batch is split."""
    return tuple(name for name in names if name not in _SHARING)


def axes_of_region(axes: Axes | None) -> Axes | None:
    """Those of the axes in an entry of a partition spec by which the replica region divides."""
    return entry_of(batch_axes(names_of(axes)))


def entry_of(names: Sequence[str]) -> Axes | None:
    """The entry of a partition spec with these names; the opposite of `names_of`."""
    return tuple(names) if len(names) > 1 else next(iter(names), None)


def names_of(axes: Axes | None) -> tuple[str, ...]:
    """The names in an entry of a partition spec, the slowest first; none for None."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes
