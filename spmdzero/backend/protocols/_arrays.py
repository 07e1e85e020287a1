"""Protocol of a backend's arrays: questions about one tensor on the devices."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from spmdzero.backend.forms._indices import IndexRange

Form = tuple[tuple[int, ...], torch.dtype, str]
"""Shape, dtype and `Arrays.sharding_of` of a tensor."""


class Arrays(Protocol):
    """Questions about a tensor that a `Mesh` made, or that was computed from one.

    Attributes:
        PARAMETER: the class of an `nn.Parameter` of such a tensor.
    """

    PARAMETER: type

    def attributes(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The attributes that users set on `tensor`, or on a tensor that may take its place."""

    def is_mine(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on this backend's devices."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of `tensor` as a CPU tensor, computed first if it is pending."""

    def mix_with_cpu(self) -> None:
        """Lets a call outside of the region take tensors on the CPU beside those on the devices.

        Its result is on the devices, unless it writes into a tensor on the CPU. Clients believe
        that all is on the CPU, as averages of parameters that they were told to put there.
        """

    def inner(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a dispatch mode sees in the place of `tensor`."""

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None = None,
        *,
        retain_graph: bool | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """`torch.autograd.backward`, in which function modes stay on, as recomputation needs them.

        `torch.Tensor.backward` turns them off, and since torch 2.14 `torch.autograd.backward` does
        so for a subclass.
        """

    def replace(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Gives `tensor` alone the value of `other`, even if `tensor` is wrapped."""

    def fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`, which can be annotated and donated apart from it."""

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor with the value of `tensor`, which autograd doesn't know."""

    def indices_behind(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, IndexRange, str]]:
        """The tensors of indices with which a pending tensor is computed in global space.

        Returns them with their ranges and the user's lines; those of a forward in the replica
        region aren't among them. It is empty where the backend doesn't know what is pending.
        """

    def write_stamp(self, tensor: torch.Tensor) -> Hashable:
        """A stamp that changes whenever `tensor` is written: in place, by a view, or by `.data`."""

    def value_ids(self, tensors: Sequence[torch.Tensor]) -> list[Hashable]:
        """The id of each tensor's value, which a write changes; none of the tensors is a view.

        Unlike `write_stamp` it also changes when a batch norm updates its statistics. It may
        change, too, when a pending tensor is computed.
        """

    def set_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Makes `tensor`, its views and the tensors detached from it hold the value of `value`."""

    def are_pending(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each tensor is pending: the result of operations that have not been started."""

    def memory_of(self, tensor: torch.Tensor) -> Any:
        """An id of the memory of `tensor`, for `is_kept_beside`."""

    def is_kept_beside(self, memory: Any, tensor: torch.Tensor) -> bool:
        """Whether `memory`, which `tensor` had before, still exists beside its new memory."""

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """The sharding of `tensor` as HLO writes it, ``''`` where it has none."""

    def shapes_of(
        self, tensors: Sequence[torch.Tensor]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""

    def forms_of(self, tensors: Sequence[torch.Tensor]) -> list[Form]:
        """The form of each tensor, for which programs are compiled."""

    def are_on_host(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Says of each whether it rests in the host's memory."""

    def is_split(self, tensor: torch.Tensor) -> bool:
        """Whether devices may hold different parts of an annotated tensor."""

    def local_shards(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The shard of each device of this process, as a CPU tensor, computed first if pending."""

    def local_slices(self, tensor: torch.Tensor) -> list[tuple[slice, ...]]:
        """The slice of `tensor` that each shard holds, without padding; reads nothing back."""

    def local_shapes(self, tensor: torch.Tensor) -> list[tuple[int, ...]]:
        """The shapes of the slices in `local_slices`."""

    def local_replicas(self, tensor: torch.Tensor) -> list[int]:
        """Counts for each of `local_shards` the devices before its own that hold the same part."""
