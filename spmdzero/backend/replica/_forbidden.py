"""Refuses a forward that writes the module's own state instead of a replica's copy."""

from collections.abc import Hashable, Mapping

import torch

from spmdzero.backend._current import arrays
from spmdzero.errors import ReplicaRegionError


def write_stamps(state: Mapping[str, torch.Tensor]) -> dict[str, Hashable]:
    """The write stamp of each tensor."""
    return {name: arrays.write_stamp(tensor) for name, tensor in state.items()}


def refuse_written(before: Mapping[str, Hashable], state: Mapping[str, torch.Tensor]) -> None:
    """Raises ReplicaRegionError if a forward wrote the module's own state, not a replica's copy."""
    for name, stamp in write_stamps(state).items():
        if before.get(name, stamp) != stamp:
            raise ReplicaRegionError(
                f"forward writes {name!r} by a reference that was kept from before, such as in a "
                "list of parameters. Each replica has a copy, which only the module knows: reach "
                f"it as self.{name}"
            )
