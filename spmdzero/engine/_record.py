"""What the trace of a micro-batch came to."""

import dataclasses
from collections.abc import Collection, Sequence

import torch

from spmdzero.backend.torch_xla import (
    CapturedProgram,
    ProgramInput,
    Uploads,
    same_value,
    shardings_of,
    strangers,
)
from spmdzero.engine._capture_places import Place

Form = tuple[torch.Size, torch.dtype, str]


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    """What of tensors a program is compiled for."""
    shapes, dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
    return list(zip(shapes, dtypes, shardings_of(tensors), strict=True))


class NotCapturableError(Exception):
    """Why a trace can't stand for later steps."""


def refuse_strangers(
    inputs: Sequence[ProgramInput], uploads: Uploads, *, known: Collection[int]
) -> None:
    """Raises NotCapturableError for the first of `strangers`, whose arguments these are."""
    for found in strangers(inputs, uploads, known=known):
        raise NotCapturableError(
            f"the forward uses a tensor {list(found.tensor.shape)} that is neither an input nor "
            "part of the module: register it as a buffer"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A program, and where its inputs and outputs live.

    Attributes:
        program: the compiled program. Its sources are the tensors of `places`, the inputs of the
            forward, and what the host uploads.
        places: the state that it reads.
        forms: of each of them shape, dtype and sharding.
        hosts: role -> how many tensors the host uploads, in this order.
        outputs: the place of each root but the last, which is the loss.
        rebound: whether each of them becomes a new tensor there, or a new value of the old one.
        summed: parameters that have a gradient afterwards.
    """

    program: CapturedProgram
    places: tuple[Place, ...]
    forms: list[Form]
    hosts: tuple[tuple[str, int], ...]
    outputs: tuple[Place, ...]
    rebound: tuple[bool, ...]
    summed: frozenset[str]

    def difference(self, other: "Record") -> str | None:
        """Why `other` is another step than this one, None if it is the same."""
        if self.program.program != other.program.program:
            return (
                "the same inputs gave another graph: Python code in the model took another way, or "
                "a number in it is not the same"
            )
        if self._arrangement() != other._arrangement():
            return "the same inputs gave a graph that reads the state in another order"
        constants = zip(self.program.constants, other.program.constants, strict=True)
        if not all(same_value(mine, its) for mine, its in constants):
            return (
                "a number that Python makes in the forward changes from step to step: hand it in "
                "as an input tensor, or keep it in a buffer"
            )
        return None

    def _arrangement(self) -> tuple[object, ...]:
        return (
            self.program.inputs,
            self.program.outputs,
            self.hosts,
            [place.name for place in self.places],
            self.forms,
            [place.name for place in self.outputs],
            self.rebound,
            self.summed,
        )
