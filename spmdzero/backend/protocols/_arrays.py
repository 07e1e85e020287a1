"""What the devices hold of one tensor."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

Form = tuple[tuple[int, ...], torch.dtype, str]
"""Shape, dtype and `Arrays.sharding_of` of a tensor."""


class Arrays(Protocol):
    """Questions about a tensor that a `Mesh` made, or that was computed from one.

    Attributes:
        PARAMETER: the class of an `nn.Parameter` of such a tensor.
    """

    PARAMETER: type

    def attributes(self, tensor: torch.Tensor) -> dict[str, Any]:
        """What was set on `tensor`, or on one that it may be exchanged with, by its users."""

    def is_mine(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on this backend's devices."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value on the CPU, once it is computed."""

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
        """`torch.autograd.backward` in which function modes stay, for what is recomputed in it.

        `torch.Tensor.backward` leaves them out, and since torch 2.14 the other does for a subclass.
        """

    def replace(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Makes `tensor` alone hold what `other` holds, whatever wraps it."""

    def fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values as a tensor of its own, which may be annotated and donated apart."""

    def write_stamp(self, tensor: torch.Tensor) -> Hashable:
        """Changes whenever `tensor` is written: in place, through a view, or through `.data`."""

    def value_ids(self, tensors: Sequence[torch.Tensor]) -> list[Hashable]:
        """One for each tensor that is no view: the same as before if nothing was written into it.

        Unlike `write_stamp` this sees what a batch norm does to its statistics. It may change too
        when a pending tensor is computed.
        """

    def set_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Makes `tensor`, what is detached from it and its views hold what `value` holds."""

    def are_pending(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each is the result of operations that have not been started."""

    def buffer_handles(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """What tells the memory of computed tensors apart; shared by those that share it."""

    def memory_of(self, tensor: torch.Tensor) -> Any:
        """What tells the memory of `tensor` apart, for `is_kept_beside`."""

    def is_kept_beside(self, memory: Any, tensor: torch.Tensor) -> bool:
        """Whether `memory`, which was that of `tensor`, stays while its new value takes another."""

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """The annotation as HLO writes it, ``''`` where there is none."""

    def forms_of(self, tensors: Sequence[torch.Tensor]) -> list[Form]:
        """Of each what a program is compiled for."""

    def is_split(self, tensor: torch.Tensor) -> bool:
        """Whether an annotated tensor may be different on each device."""

    def local_shards(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What each device of this process holds, as CPU tensors, once it is computed."""

    def local_slices(self, tensor: torch.Tensor) -> list[tuple[slice, ...]]:
        """The part that each of them holds, padding left out; nothing is read from the devices."""

    def local_shapes(self, tensor: torch.Tensor) -> list[tuple[int, ...]]:
        """The shapes of `local_slices`."""

    def local_replicas(self, tensor: torch.Tensor) -> list[int]:
        """For each of them, how many devices before it hold the same part."""


class HostMemory(Protocol):
    """The host's memory, in which a program may keep what it computes, in the replica region."""

    def missing(self) -> str:
        """Why the program that is being traced has none to itself, ``""`` where it has."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers there; only `from_host` may read it. Autograd sees nothing of it."""

    def from_host(self, tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """What `to_host` was given, on the devices, fetched once `after` is known."""
