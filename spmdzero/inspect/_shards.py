"""Shows which device holds which part of a tensor."""

from dataclasses import dataclass
from math import prod

import torch

from spmdzero._display import Shown
from spmdzero.backend import arrays, runtime
from spmdzero.errors import SpmdZeroUsageError


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a tensor that one device holds.

    Attributes:
        device: the device's name, such as ``TPU:0``.
        slices: the part of the global tensor, a slice for each dim, without padding.
    """

    device: str
    slices: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(part.stop - part.start for part in self.slices)


@dataclass(frozen=True, kw_only=True, repr=False)
class ShardView(Shown):
    """The parts of one tensor on each device; print it, or let a notebook draw it.

    Attributes:
        shape: the global shape.
        dtype: torch's name of the dtype, such as ``float32``.
        element_bytes: bytes of one element.
        shards: one shard for each device of this process, in the devices' order.
    """

    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    shards: tuple[Shard, ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the largest part that a device holds."""
        return max(prod(shard.shape) for shard in self.shards) * self.element_bytes

    @property
    def parts(self) -> tuple[tuple[slice, ...], ...]:
        """The different parts, in the order of the first device that holds each."""
        found: list[tuple[slice, ...]] = []
        for shard in self.shards:
            if shard.slices not in found:
                found.append(shard.slices)
        return tuple(found)

    @property
    def summary(self) -> str:
        """Shape, number of parts, and bytes per device, in one line."""
        whole = prod(self.shape) * self.element_bytes
        count, parts = len(self.shards), len(self.parts)
        named = f"{self.dtype} {list(self.shape)}"
        if parts == 1:
            return f"{named}, whole on each of {count} devices: {whole:,} bytes per device"
        return (
            f"{named}, {parts} parts on {count} devices: "
            f"{self.bytes_per_device:,} of {whole:,} bytes per device"
        )

    def __repr__(self) -> str:
        return f"ShardView({self.summary})"


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parts of `tensor` on the devices of this process, as CPU tensors.

    It waits for the devices' running programs.
    """
    return arrays.local_shards(tensor)


def shards(tensor: torch.Tensor) -> ShardView:
    """The part of `tensor`, a tensor on the mesh, that each local device holds.

    It waits for the devices' running programs. No data leaves the devices, and nothing pending
    runs.

    Raises:
        SpmdZeroUsageError: the tensor is not on the mesh, or is pending without an annotation.
    """
    if not arrays.is_mine(tensor):
        raise SpmdZeroUsageError(
            f"the tensor is on {tensor.device}, where no mesh splits it. Pass one that lives on "
            "the mesh: a parameter of engine.module, or a value of engine.named_tensors()"
        )
    runtime.wait()
    if not arrays.sharding_of(tensor):
        raise SpmdZeroUsageError(
            "the compiler has not placed this tensor yet: it is the result of operations that are "
            "still pending. Run them first: spmdzero.backend.runtime.sync()"
        )
    return ShardView(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        element_bytes=tensor.element_size(),
        shards=tuple(
            Shard(device=device, slices=slices)
            for device, slices in zip(
                runtime.local_devices(), arrays.local_slices(tensor), strict=True
            )
        ),
    )
