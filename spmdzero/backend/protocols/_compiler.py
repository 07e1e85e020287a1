"""Protocol of a backend's compiler: functions traced once, and programs started again."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch


class StandInKeptError(Exception):
    """The traced code kept a tensor that it computed while it was traced."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoldedFunction:
    """A function of tensors that is traced and lowered: calling it traces nothing.

    Attributes:
        proto: the serialised program; functions that compute the same have the same.
        constants: the values that it reads beside its inputs, the same at each call.
        arguments: for each parameter of the program the index of an input, or a constant.
        body: the backend's program, called with a tensor for each parameter.
    """

    proto: bytes
    constants: tuple[torch.Tensor, ...]
    arguments: tuple[int | torch.Tensor, ...]
    body: Any

    @property
    def reads(self) -> frozenset[int]:
        """Indices of the inputs that the function depends on."""
        return frozenset(a for a in self.arguments if isinstance(a, int))

    @property
    def arrangement(self) -> tuple[int | None, ...]:
        """Gives for each parameter of the program the index of an input, or None for a constant."""
        return tuple(a if isinstance(a, int) else None for a in self.arguments)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The pending results of the function for `inputs`."""
        return self.body(self.given(inputs))

    def given(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensor that each parameter of the program takes, for these `inputs`."""
        return [inputs[a] if isinstance(a, int) else a for a in self.arguments]

    def renumbered(self, moved: Mapping[int, int]) -> "FoldedFunction":
        """This function with its inputs in another order; `moved` maps old indices to new ones."""
        arguments = tuple(moved[a] if isinstance(a, int) else a for a in self.arguments)
        return dataclasses.replace(self, arguments=arguments)

    def sharing(
        self,
        others: Sequence[torch.Tensor],
        same_value: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> "FoldedFunction":
        """This function with each constant replaced by an equal one of `others`, if there is one.

        The compiler merges equal operations of two functions only if they read the same constants.

        Args:
            others: constants of other functions.
            same_value: see `Compiler`.
        """
        found = {
            id(own): other for own in self.constants for other in others if same_value(own, other)
        }
        return dataclasses.replace(
            self,
            constants=tuple(found.get(id(own), own) for own in self.constants),
            arguments=tuple(
                a if isinstance(a, int) else found.get(id(a), a) for a in self.arguments
            ),
        )


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


class Compiler(Protocol):
    """Compiles functions that are written in Python, and starts what is compiled again."""

    def fold(
        self,
        function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        *,
        more: Sequence[torch.Tensor] = (),
    ) -> FoldedFunction:
        """Traces `function` with stand-ins for `inputs`, which have only their shapes and dtypes.

        Args:
            function: pure: it writes nothing that outlives it. It returns at least one tensor, and
                never an input itself.
            inputs: tensors like those of later calls.
            more: further inputs, which `function` discovers only while it is traced: it appends a
                `stand_in` for each.
        """

    def stand_in(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without data for `more` of `fold`: it can only take part in computations."""

    def no_stand_in_left(self) -> contextlib.AbstractContextManager[None]:
        """Context around code that calls `fold`: no tensor computed from a stand-in outlives it.

        Raises:
            StandInKeptError: some code kept such a tensor, which was taken from it.
        """

    def take_seed(self) -> torch.Tensor:
        """The next seed of the devices' own generator, 0-dim int32; no other draw gets it."""

    def drawing(
        self, seed: torch.Tensor, *, first: int = 0
    ) -> contextlib.AbstractContextManager[Any]:
        """Context in which draws from the devices' own generator take `seed`.

        Args:
            seed: see `take_seed`.
            first: the number of the first draw; what is yielded has that of the next as `count`.
        """

    def record_uploads(self) -> contextlib.AbstractContextManager[Any]:
        """Context that records each upload inside, for `unknown_values`."""

    def unknown_values(
        self, inputs: Sequence[torch.Tensor], uploads: Any, *, known: Collection[int] = ()
    ) -> Sequence[torch.Tensor]:
        """The constants of a folded function that may differ when it runs again.

        Args:
            inputs: the constants.
            uploads: those recorded since the trace began.
            known: handles of other constants that stay the same.
        """

    def handles(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """An id of the memory of each computed tensor; tensors that share memory have the same."""

    def same_value(self, mine: torch.Tensor, its: torch.Tensor) -> bool:
        """Whether two computed tensors on the devices are equal; NaN equals NaN."""

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
