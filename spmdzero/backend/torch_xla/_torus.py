"""The torus of the present chips, from torch_xla's attributes of each device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmdzero.backend.chips._torus import Torus


def torus_of(attributes: Sequence[Mapping[str, Any]]) -> Torus | None:
    """Number of chips along each direction, x first.

    Args:
        attributes: of each device of all processes, as in torch_xla.runtime's
            `global_runtime_device_attributes`: ``name`` such as ``TPU:3``, ``coords``, and
            ``slice_index`` where there are several slices.

    Returns None where the devices don't fill one slice, or aren't numbered along x first.
    """
    if not all("coords" in each for each in attributes):
        return None
    ordered = sorted(attributes, key=lambda each: int(str(each["name"]).rpartition(":")[2]))
    coords = [tuple(each["coords"]) for each in ordered]
    torus = tuple(1 + max(place) for place in zip(*coords, strict=True))
    slices = {each.get("slice_index", 0) for each in ordered}
    if len(slices) > 1 or math.prod(torus) != len(coords):
        return None
    # NumPy calls the order with x first Fortran's.
    numbered = zip(*np.unravel_index(np.arange(len(coords)), torus, order="F"), strict=True)
    return torus if coords == [tuple(map(int, place)) for place in numbered] else None
