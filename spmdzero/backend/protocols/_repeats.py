"""Programs that a step starts again without recording all of its operations."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch


class Kept(Protocol):
    """The values that tensors had at one time, whatever is written into the tensors later."""

    def release(self) -> None:
        """Lets programs overwrite the values."""


class Beginning(Protocol):
    """The operations that are recorded and not started, and the values that the rest will take."""

    @property
    def key(self) -> Hashable:
        """It is equal for beginnings that compute the same from other values."""

    def text(self) -> str:
        """The text of these operations, as `Programs.text` has it."""


class Repeat(Protocol):
    """A program that computes a beginning and the rest of a step, for like beginnings."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of the state's tensors that the program reads."""

    def start(
        self,
        beginning: Any,
        *,
        state: Sequence[torch.Tensor],
        numbers: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor] | None:
        """Starts the program: it computes what is recorded, and does the rest of the step.

        Args:
            beginning: what is recorded now; the values kept for it are given up.
            state: the tensors of `reads`.
            numbers: as for `build`.
            into: for each of its `new` the tensor that takes it, or None for a new one.

        Returns the tensors of `new`; None if the program doesn't fit, and nothing has happened.
        """


class Repeats(Protocol):
    """Compiles what a step does after its beginning, and does it again."""

    def keep(
        self, tensors: Sequence[torch.Tensor], *, first: Callable[[], None] | None = None
    ) -> Kept:
        """Keeps the present values of `tensors`, which no program may overwrite meanwhile.

        Args:
            tensors: on the devices.
            first: what is done before another program starts, such as that of a value that is read.
        """

    def tensors(self, kept: Any) -> list[torch.Tensor]:
        """New tensors with the values that were kept."""

    def beginning(self, kept: Any) -> Beginning:
        """Returns what is recorded now, after which operations on the `kept` values follow."""

    def build(
        self,
        beginning: Any,
        *,
        state: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        into: Sequence[int | None],
        numbers: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
    ) -> Repeat | None:
        """Compiles a beginning and the rest of its step; None if its inputs can't be told apart.

        Args:
            beginning: what is recorded now.
            state: the tensors of the state.
            new: pending tensors, computed by the rest of the step, which nobody writes.
            into: for each of `new` the index in `state` of the tensor that takes it, or None.
            numbers: the host's uploads for the rest, others at each step.
            constants: tensors that the rest reads, the same at each step.
        """
