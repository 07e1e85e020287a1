"""The shape of the device mesh, without devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spmdzero.errors import SpmdZeroConfigError

# The order of the mesh's axes: neighbours on the last axis are nearest in device order.
_AXIS_ORDER = ("data", "fsdp", "tensor")


def _refuse(value: object, *, reason: str, fix: str) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(key="spmd.mesh", value=value, reason=reason, fix=fix)


@dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of the mesh axes. The batch is split over ``data`` and ``fsdp``.

    Attributes:
        axes: (name, number of devices) per axis, in the order ``data``, ``fsdp``, ``tensor``, of
            which only ``fsdp`` is always there. States are sharded over ``fsdp`` and replicated
            over ``data``. Devices along ``tensor`` share one replica's work: the dims of weights
            that the plan says are split over them.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        known = tuple(name for name in _AXIS_ORDER if name in self.names)
        if "fsdp" not in self.names or self.names != known:
            raise _refuse(
                self.names,
                reason="the mesh axes are 'fsdp', before it 'data' and behind it 'tensor', if "
                "wanted, each once",
                fix='Write {"fsdp": -1}, {"data": 2, "fsdp": -1} for two copies of the shards, or '
                '{"fsdp": -1, "tensor": 2} for weights that two devices share.',
            )
        for name, size in self.axes:
            if size < 1:
                raise _refuse(
                    dict(self.axes),
                    reason=f"axis {name!r} has {size} devices",
                    fix="Give every axis a size of at least 1.",
                )

    @classmethod
    def resolve(cls, axes: Mapping[str, int], *, device_count: int) -> "MeshSpec":
        """The mesh that `axes` asks for on `device_count` devices; one size may be -1.

        Raises:
            SpmdZeroConfigError: an unknown axis, no ``fsdp`` axis, a size that is neither
                positive nor -1, more than one -1, or sizes that don't multiply to `device_count`.
        """
        # An axis tensor of one device splits nothing.
        asked = {name: size for name, size in axes.items() if (name, size) != ("tensor", 1)}
        sizes = {name: asked[name] for name in sorted(asked)}
        open_axes = [name for name, size in sizes.items() if size == -1]
        known = math.prod(size for size in sizes.values() if size != -1)
        if len(open_axes) == 1 and known > 0:
            sizes[open_axes[0]] = max(1, device_count // known)
        mesh = cls(tuple(sizes.items()))
        if mesh.size != device_count:
            raise _refuse(
                dict(axes),
                reason=f"the sizes multiply to {known}, there are {device_count} devices",
                fix=f"Choose sizes that divide {device_count}."
                if open_axes
                else f"Choose sizes whose product is {device_count}, or set one axis to -1.",
            )
        return mesh

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
        """The axes over which rows are split: all but ``tensor``."""
        return tuple(name for name in self.names if name != "tensor")

    @property
    def fsdp(self) -> int:
        """Replicas that share one copy of the states."""
        return dict(self.axes)["fsdp"]

    @property
    def tensor(self) -> int:
        """Devices that share one replica's work: 1 when the mesh has no ``tensor`` axis."""
        return dict(self.axes).get("tensor", 1)

    @property
    def data(self) -> int:
        """Copies of the states: 1 when the mesh has no ``data`` axis."""
        return dict(self.axes).get("data", 1)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)
