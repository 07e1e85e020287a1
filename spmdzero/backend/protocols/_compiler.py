"""Functions of tensors, traced once and compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch


class StandInKeptError(Exception):
    """What is traced keeps a tensor that it computed."""


class ProgramLostError(Exception):
    """A compiled program is no longer kept, for others that were used since."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoldedFunction:
    """A function of tensors, lowered: calling it traces nothing.

    Attributes:
        proto: its program, serialised: equal for functions that compute the same.
        constants: what it reads beside its inputs, the same at each call; each has a `tensor`, and
            says whether it `is_seed` of the devices' own generator.
        arguments: the index of an input, or a constant's tensor, for each parameter of the program.
        body: the backend's program, called with a tensor for each parameter.
    """

    proto: bytes
    constants: tuple[Any, ...]
    arguments: tuple[int | torch.Tensor, ...]
    body: Any

    @property
    def reads(self) -> frozenset[int]:
        """The inputs that it depends on."""
        return frozenset(a for a in self.arguments if isinstance(a, int))

    @property
    def arrangement(self) -> tuple[int | None, ...]:
        """For each parameter of the program the index of an input; None for a constant."""
        return tuple(a if isinstance(a, int) else None for a in self.arguments)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the function returns for `inputs`, pending."""
        return self.body(self.given(inputs))

    def given(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A tensor for each parameter of the program."""
        return [inputs[a] if isinstance(a, int) else a for a in self.arguments]

    def renumbered(self, moved: Mapping[int, int]) -> "FoldedFunction":
        """The function of inputs in another order: old index -> new, for those that it reads."""
        arguments = tuple(moved[a] if isinstance(a, int) else a for a in self.arguments)
        return dataclasses.replace(self, arguments=arguments)

    def sharing(
        self, others: Sequence[Any], same_value: Callable[[torch.Tensor, torch.Tensor], bool]
    ) -> "FoldedFunction":
        """This function, which reads one of `others` where it has an equal constant of its own.

        The compiler finds operations of two functions to be the same only if they read the same.

        Args:
            others: constants.
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
    """A program on the devices."""

    def run(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Starts it; what was donated of `sources` is gone afterwards.

        Args:
            sources: what it is called with.
            into: for each output the tensor that holds it from then on, as `Arrays.set_value` has
                it, None for a new one.

        Returns the tensors that hold the outputs.

        Raises:
            ProgramLostError: it is no longer kept; nothing has changed.
        """


class Compiler(Protocol):
    """Makes programs of Python."""

    def fold(
        self,
        function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        *,
        more: Sequence[torch.Tensor] = (),
    ) -> FoldedFunction:
        """Traces `function` with stand-ins for `inputs`, which have their shapes and dtypes only.

        Args:
            function: pure: writes nothing that outlives it. Returns at least one tensor; what it
                returns is not an input.
            inputs: tensors like those of later calls.
            more: further inputs, of which `function` finds out only while it is traced: it appends
                a `stand_in` for each.
        """

    def stand_in(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without data, for `fold`'s `more`: it can only be computed with."""

    def no_stand_in_left(self) -> contextlib.AbstractContextManager[None]:
        """Around code that calls `fold`: nothing that was computed from a stand-in outlives it.

        Raises:
            StandInKeptError: something had to be taken from somebody who kept it.
        """

    def compile_alone(
        self,
        function: FoldedFunction,
        sources: Sequence[torch.Tensor],
        *,
        donated: Mapping[int, int],
        state: int,
    ) -> CompiledProgram:
        """Compiles a folded function as a program that holds nothing else.

        Args:
            function: of `fold`.
            sources: what it is to be called with, all of it computed.
            donated: output -> the source whose memory it takes, of the same size.
            state: the first so many sources outlive the program, and share no memory.
        """

    def record_uploads(self) -> contextlib.AbstractContextManager[Any]:
        """Takes down each upload inside, for `unknown_values`."""

    def unknown_values(
        self, inputs: Any, uploads: Any, *, known: Collection[int] = ()
    ) -> Sequence[Any]:
        """Those constants of a folded function that may be something else when it runs again.

        Args:
            inputs: the constants.
            uploads: since the trace began.
            known: handles of others that are none.
        """

    def same_value(self, mine: torch.Tensor, its: torch.Tensor) -> bool:
        """Whether two tensors on the devices, both computed, are equal; NaN equals NaN."""

    def start_pending(self, device: torch.device) -> None:
        """Starts what is recorded, as `Runtime.sync` does, without ending a step."""
