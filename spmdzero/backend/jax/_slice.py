"""The devices of a mesh, and the torus of their chips."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from spmdzero.backend.chips._torus import Torus


def devices_by_host() -> list[jax.Device]:
    """All devices; those of one process are beside each other, as its rows are."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def torus_of(devices: Sequence[Any]) -> Torus | None:
    """Chips along each direction of JAX's devices, a device a chip, x first.

    They need not be numbered along x: host by host libtpu was seen to scatter over groups of a
    direction's length too (0.0.21 on v5e:4x4 and v5p:4x4x4), as long as no group is all of them.

    Returns None where they are not one slice, filled.
    """
    if not all(hasattr(device, "coords") for device in devices):
        return None
    coords = {tuple(device.coords) for device in devices}
    slices = {getattr(device, "slice_index", 0) for device in devices}
    torus = tuple(1 + max(place) for place in zip(*coords, strict=True))
    return torus if len(slices) == 1 and math.prod(torus) == len(coords) == len(devices) else None
