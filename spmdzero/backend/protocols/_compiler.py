"""Protocol of a backend's compiler: functions of tensors, traced once and compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch


class StandInKeptError(Exception):
    """The traced code kept a tensor that it computed while it was traced."""


class ProgramLostError(Exception):
    """A compiled program was discarded, because others have been used since."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoldedFunction:
    """A function of tensors that is traced and lowered: calling it traces nothing.

    Attributes:
        proto: the serialised program; functions that compute the same have the same.
        constants: the values that it reads beside its inputs, the same at each call; each has a
            `tensor`, and `is_seed` says whether it is the seed of the devices' own generator.
        arguments: for each parameter of the program the index of an input, or a constant's tensor.
        body: the backend's program, called with a tensor for each parameter.
    """

    proto: bytes
    constants: tuple[Any, ...]
    arguments: tuple[int | torch.Tensor, ...]
    body: Any

    @property
    def constant_tensors(self) -> list[torch.Tensor]:
        """The tensors of `constants`."""
        return [constant.tensor for constant in self.constants]

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
        self, others: Sequence[Any], same_value: Callable[[torch.Tensor, torch.Tensor], bool]
    ) -> "FoldedFunction":
        """This function with each constant replaced by an equal one of `others`, if there is one.

        The compiler merges equal operations of two functions only if they read the same constants.

        Args:
            others: constants of other functions.
            same_value: see `Compiler`.
        """
        found = {
            id(own.tensor): other
            for own in self.constants
            for other in others
            if own.is_seed == other.is_seed and same_value(own.tensor, other.tensor)
        }
        return dataclasses.replace(
            self,
            constants=tuple(found.get(id(own.tensor), own) for own in self.constants),
            arguments=tuple(
                found[id(a)].tensor if not isinstance(a, int) and id(a) in found else a
                for a in self.arguments
            ),
        )


class CompiledProgram(Protocol):
    """A compiled program on the devices."""

    def run(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Starts the program; the donated tensors of `sources` are gone afterwards.

        Args:
            sources: the program's arguments.
            into: for each output the tensor that takes its value, as in `Arrays.set_value`, or None
                for a new tensor.

        Returns the tensors that hold the outputs.

        Raises:
            ProgramLostError: the program was discarded; nothing has changed.
        """


class Compiler(Protocol):
    """Compiles functions that are written in Python."""

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

    def compile_alone(
        self,
        function: FoldedFunction,
        sources: Sequence[torch.Tensor],
        *,
        donated: Mapping[int, int],
        state: int,
    ) -> CompiledProgram:
        """Compiles a folded function as a program of its own.

        Args:
            function: made by `fold`.
            sources: the arguments of the first call, all computed.
            donated: output -> the source whose memory the output takes, of the same size.
            state: the first `state` sources outlive the program, and share no memory.
        """

    def record_uploads(self) -> contextlib.AbstractContextManager[Any]:
        """Context that records each upload inside, for `unknown_values`."""

    def unknown_values(
        self, inputs: Any, uploads: Any, *, known: Collection[int] = ()
    ) -> Sequence[Any]:
        """The constants of a folded function that may differ when it runs again.

        Args:
            inputs: the constants.
            uploads: those recorded since the trace began.
            known: handles of other constants that stay the same.
        """

    def same_value(self, mine: torch.Tensor, its: torch.Tensor) -> bool:
        """Whether two computed tensors on the devices are equal; NaN equals NaN."""

    def start_pending(self, device: torch.device) -> None:
        """Starts the pending operations as `Runtime.sync` does, without ending a step."""
