"""Protocols of a mesh, which makes and annotates tensors, and of a reduction of gradients."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from spmdzero.plan import Layout, MeshSpec

# For each dim of a tensor the mesh axis, or axes, that it is split over; None for none.
PartitionSpec: TypeAlias = tuple[str | tuple[str, ...] | None, ...]

REPLICATED: PartitionSpec = ()
"""The spec of a tensor that every device holds whole, whatever its number of dims."""


class Across(Protocol):
    """Converts between tensors that each host has for itself and tensors that all hosts share.

    Every host has tensors of its own: those that its script moves to the devices, and those
    computed from them. Their shapes and values are those of this host alone.
    """

    @property
    def hosts(self) -> int:
        """Number of hosts."""

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may differ from host to host."""

    def own_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This host's own rows of all hosts' rows in `dim`: `[b, ...]` to `[b/h, ...]`.

        Where `dim` is 0 nothing moves, and computed values stay the same tensor.
        """

    def all_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows of all hosts in `dim`, host after host: `[b/h, ...]` to `[b, ...]`.

        A tensor that is the same on all hosts is repeated, once for each host.
        """

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over hosts, the same on all; `tensor` itself where it is the same on all."""


class Mesh(Protocol):
    """The devices of a `MeshSpec`."""

    @property
    def across(self) -> Across | None:
        """Conversion between hosts' tensors; None where every tensor is the same on all hosts."""

    @property
    def spec(self) -> MeshSpec:
        """The named axes and their sizes."""

    @property
    def size(self) -> int:
        """Number of devices in the mesh."""

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas, each of which runs the model on its own rows."""

    def batch_spec(self, ndim: int, dim: int = 0) -> PartitionSpec:
        """The spec of an `ndim`-dimensional tensor whose `dim` is split over the replicas."""

    def mark(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Constrains `tensor` to `spec` and returns the constrained tensor."""

    def lay(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """`mark` of a tensor that is stored as `layout` says."""

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """`mark` of a tensor that every device holds whole."""

    def commit(self, old: torch.Tensor, new: torch.Tensor, spec: PartitionSpec) -> None:
        """Makes `old` hold `new`, constrained to `spec`, in the memory of `old` (donation)."""

    def enter(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """This replica's shard of a global tensor, as a tensor in replica space.

        The region divides `data` and `fsdp`. What the axis ``tensor`` splits stays split in it, as
        the compiler's own affair, so that `spec` need not say it.
        """

    def leave(
        self, tensor: torch.Tensor, spec: PartitionSpec, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """The global tensor of `shape` whose shard on each device is `tensor`."""

    def reduce_scatter(
        self,
        local: torch.Tensor,
        *,
        axis: str,
        dim: int,
        steps: tuple[int, ...] = (),
        tensor_dim: int | None = None,
    ) -> torch.Tensor:
        """Sums over a mesh axis, and leaves each device its part of `dim`; in replica space.

        Args:
            steps: factors of the axis's length, one reduce-scatter for each; empty for one in all.
            tensor_dim: the dim that is and stays split over the axis ``tensor``; None for none.
        """

    def scatter_in_int8(
        self, local: torch.Tensor, *, axis: str, dim: int, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """`reduce_scatter` of numbers that cross in int8; called where `low_precision` says so.

        Of what a device sends to another each row has a scale: its largest is 127. They are summed
        in fp32.
        """

    def all_reduce(
        self, local: torch.Tensor, *, axis: str, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """The sum over a mesh axis, in replica space; `tensor_dim` as in `reduce_scatter`."""

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        """Every replica's tensor, `[n, *shape]`, on each device; in replica space."""

    def sum_partial(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over dim 0 of a partial `[n, *shape]`, in its dtype, which crosses the wire."""

    def place(
        self, host: torch.Tensor, spec: PartitionSpec = REPLICATED, *, waits: bool = False
    ) -> torch.Tensor:
        """Uploads a CPU tensor: each device receives only its own shard.

        With several hosts, `host` holds only this host's part of a tensor that is split.

        Args:
            waits: whether a small one may wait for the program that reads it.
        """

    def place_part(self, host: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Uploads a CPU tensor that every host has whole: each device receives only its shard."""

    def place_all(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Uploads CPU tensors whole to every device."""

    def overwrite(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Overwrites the values of `tensor` on the devices; it stays the same tensor.

        Args:
            tensor: annotated, and computed.
            parts: CPU tensors of its dtype, one for each device of this process, in the order of
                `Arrays.local_slices`.
        """

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, spec: PartitionSpec
    ) -> torch.Tensor:
        """Zeros that are created as shards: no device ever holds the whole tensor."""


class Reduction(Protocol):
    """Sums the gradients of all replicas."""

    def partial(self, local: torch.Tensor) -> torch.Tensor:
        """`[n, *shape]` in global space; row i is the gradient of device i, and nothing moves."""

    def reduce_local(
        self, local: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over replicas of each device's `local` gradient, stored as `layout` says.

        Args:
            local: `[*shape]` in replica space.
            dtype: in which it crosses the wire, None for the reduction's own.
        """

    def part_of_sum(
        self, local: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This device's part of what `reduce_local` returns, in replica space; called in a loop."""

    def reduce_partial(
        self, partial: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over dim 0 of a partial `[n, *shape]`, stored as `layout` says."""

    def release_whole(self, gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A reduced gradient with the same values, of which each device keeps only its shard."""
