"""Refuses what a forward must not do: keep a replica's tensor, or write a global one."""

from collections.abc import Hashable, Mapping

import torch
from torch import nn

from spmdzero.backend._current import arrays
from spmdzero.backend._old_norms import old_norm_error, old_norms
from spmdzero.errors import ReplicaRegionError


def kept_tensors(module: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Tensors on the devices that are plain attributes or buffers of a submodule."""
    return {
        (prefix, name): value
        for prefix, part in module.named_modules()
        for name, value in (*vars(part).items(), *part._buffers.items())
        if isinstance(value, torch.Tensor) and arrays.is_mine(value)
    }


def refuse_new(
    module: nn.Module,
    before: Mapping[tuple[str, str], torch.Tensor],
    after: Mapping[tuple[str, str], torch.Tensor],
) -> None:
    """Raises ReplicaRegionError if a forward of `module` has put a tensor into an attribute."""
    for (prefix, name), value in after.items():
        if before.get((prefix, name)) is not value:
            path = f"{prefix}.{name}" if prefix else name
            norm = old_norms(module.get_submodule(prefix)).get(name)
            if norm is not None:
                raise ReplicaRegionError(old_norm_error(path, norm))
            raise ReplicaRegionError(
                f"forward keeps a tensor in the attribute {path!r}. It belongs to one replica and "
                "can't be used outside of the forward (XLA would abort the process): return it, "
                "or register a buffer before initialize and write to it"
            )


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
