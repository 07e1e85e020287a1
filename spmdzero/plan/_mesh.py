"""The shape of the device mesh, without devices."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spmdzero.errors import SpmdZeroConfigError

# The order of the mesh's axes: neighbours on the last axis are nearest in device order.
_AXIS_ORDER = ("data", "fsdp")


def _refuse(value: object, *, reason: str, fix: str) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(key="spmd.mesh", value=value, reason=reason, fix=fix)


def _check_names(names: Collection[str]) -> None:
    for name in names:
        if name not in _AXIS_ORDER:
            raise _refuse(
                tuple(names),
                reason=f"there is no mesh axis {name!r}",
                fix='Use the axes "data" and "fsdp".',
            )
    if "fsdp" not in names:
        raise _refuse(
            tuple(names),
            reason="states are sharded over the fsdp axis, which is missing",
            fix='Add "fsdp": -1 to take the devices that the other axis leaves.',
        )


@dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of the mesh axes. The batch is split over all of them.

    Attributes:
        axes: (name, number of devices) per axis, ``data`` before ``fsdp``. States are sharded
            over ``fsdp`` and replicated over ``data``, which may be absent.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        _check_names(self.names)
        if self.names != tuple(name for name in _AXIS_ORDER if name in self.names):
            raise _refuse(
                self.axes,
                reason="the axes are out of order or named twice",
                fix='Put "data" before "fsdp", each once.',
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
        _check_names(axes)
        value = dict(axes)
        open_axes = [name for name, size in axes.items() if size == -1]
        known = math.prod(size for size in axes.values() if size != -1)
        if len(open_axes) > 1:
            raise _refuse(
                value,
                reason=f"{' and '.join(open_axes)} are both -1",
                fix="Leave at most one axis at -1.",
            )
        if known > 0 and (device_count % known if open_axes else device_count != known):
            fix = (
                f"Choose sizes that divide {device_count}."
                if open_axes
                else f"Choose sizes whose product is {device_count}, or set one axis to -1."
            )
            raise _refuse(
                value,
                reason=f"the sizes multiply to {known}, there are {device_count} devices",
                fix=fix,
            )
        sizes = {
            name: device_count // known if size == -1 and known > 0 else size
            for name, size in axes.items()
        }
        return cls(tuple((name, sizes[name]) for name in _AXIS_ORDER if name in sizes))

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
    def fsdp(self) -> int:
        """Devices that share one copy of the states."""
        return dict(self.axes)["fsdp"]

    @property
    def data(self) -> int:
        """Copies of the states: 1 when the mesh has no ``data`` axis."""
        return dict(self.axes).get("data", 1)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)
