"""Tensors with a layout: making, annotating and reducing them."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from spmdzero.plan import Layout, MeshSpec

# For each dim of a tensor the mesh axis, or axes, that it is split over; None for none.
PartitionSpec: TypeAlias = tuple[str | tuple[str, ...] | None, ...]

REPLICATED: PartitionSpec = ()
"""Every device has all of the tensor, however many dims it has."""


class Across(Protocol):
    """Carries tensors between what each of several hosts has for itself and what all have.

    What a script moves to the devices, and what is computed from it, is its host's own: of the
    shape, and with the value, that it has there.
    """

    @property
    def hosts(self) -> int:
        """How many there are."""

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may be another on each host."""

    def own_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Of all hosts' rows in `dim`, host after host, its own: `[b, ...]` to `[b/h, ...]`.

        Nothing moves, and what is computed is the same tensor, where `dim` is 0.
        """

    def all_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows of all hosts: `[b/h, ...]` to `[b, ...]`; those of a tensor that all hosts have
        the same count once for each.
        """

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over hosts, the same on all; the tensor itself where that is the same."""


class Mesh(Protocol):
    """The devices of a `MeshSpec`."""

    @property
    def across(self) -> Across | None:
        """Between the hosts; None where no tensor is another on each of them."""

    @property
    def spec(self) -> MeshSpec:
        """The named axes and their sizes."""

    @property
    def size(self) -> int:
        """Devices in the mesh."""

    @property
    def replicas(self) -> int:
        """Data-parallel replicas: each runs the model on rows of its own."""

    def batch_spec(self, ndim: int, dim: int = 0) -> PartitionSpec:
        """`dim` of an `ndim`-dimensional tensor split over all axes."""

    def mark(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Constrains `tensor` to `spec`: go on with what this returns."""

    def commit(self, old: torch.Tensor, new: torch.Tensor, spec: PartitionSpec) -> None:
        """Makes `old` hold `new`, constrained to `spec`, so that it takes its memory (donation)."""

    def enter(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """This device's shard of a global tensor, in replica space."""

    def leave(
        self, tensor: torch.Tensor, spec: PartitionSpec, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """The global tensor of `shape` whose shard on each device is `tensor`."""

    def reduce_scatter(
        self, local: torch.Tensor, *, axis: str, dim: int, steps: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """The sum over an axis, of which each device keeps its part of `dim`; in replica space.

        Args:
            steps: factors of the axis's length, one reduce-scatter for each; none for one.
        """

    def all_reduce(self, local: torch.Tensor, *, axis: str) -> torch.Tensor:
        """The sum over an axis, in replica space."""

    def sum_partial(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over dim 0 of a Partial `[n, *shape]`, in its dtype, which crosses the wire."""

    def place(self, host: torch.Tensor, spec: PartitionSpec = REPLICATED) -> torch.Tensor:
        """Uploads a CPU tensor: each device receives only its own shard.

        With several hosts a tensor that is split holds this host's part only.
        """

    def place_part(self, host: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """As `place`, of a tensor that every host has all of: each device receives its shard."""

    def place_all(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Uploads CPU tensors to every device whole."""

    def overwrite(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Replaces what the devices hold of `tensor`, which stays the same tensor.

        Args:
            tensor: annotated, and computed.
            parts: what each device of this process is to hold, CPU tensors of its dtype in the
                order of `Arrays.local_slices`.
        """

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, spec: PartitionSpec
    ) -> torch.Tensor:
        """Zeros that are born as shards: no device ever holds the whole tensor."""


class Reduction(Protocol):
    """How replicas' gradients become one."""

    def partial(self, local: torch.Tensor) -> torch.Tensor:
        """`[n, *shape]` in global space, row i being device i's own gradient: nothing moves."""

    def reduce_local(
        self, local: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over replicas of each device's `local` gradient, stored as planned.

        Args:
            local: `[*shape]` in replica space.
            dtype: what crosses the wire, where that is not the reduction's own.
        """

    def part_of_sum(
        self, local: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This device's part of what `reduce_local` returns, in replica space; called in a loop."""

    def reduce_partial(
        self, partial: torch.Tensor, layout: Layout, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum over dim 0 of a Partial `[n, *shape]`, stored as planned."""

    def let_go_of_whole(self, gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A reduced gradient, number for number, of which devices keep their shards only."""
