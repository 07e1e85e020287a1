"""The devices of a mesh, and the torus of their chips."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from spmdzero.backend.chips._torus import Torus


def devices_by_host() -> list[jax.Device]:
    """All devices, host by host, in the order of the hosts' rows."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def batch_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes over which rows are split, and which the region divides; see `MeshSpec`."""
    return tuple(name for name in mesh.axis_names if name != "tensor")


def replicas_of(mesh: jax.sharding.Mesh) -> int:
    """Number of data-parallel replicas."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def torus_of(devices: Sequence[Any]) -> Torus | None:
    """Number of chips along each direction of JAX's devices, x first; a device is a chip.

    The devices need not be numbered along x: libtpu was seen to scatter over groups of a
    direction's length in the order of hosts too (0.0.21 on v5e:4x4 and v5p:4x4x4), unless one group
    is all.

    Returns None where they don't fill one slice.
    """
    if not all(hasattr(device, "coords") for device in devices):
        return None
    coords = {tuple(device.coords) for device in devices}
    slices = {getattr(device, "slice_index", 0) for device in devices}
    torus = tuple(1 + max(place) for place in zip(*coords, strict=True))
    return torus if len(slices) == 1 and math.prod(torus) == len(coords) == len(devices) else None
