"""A step's pending program, for those who want to see what is compiled."""

import dataclasses
import functools
from collections.abc import Mapping

import torch

from spmdzero.backend import AnnotatedProgram, programs
from spmdzero.engine._repeated_rows import RepeatedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One program that the engine is about to run.

    Attributes:
        kind: ``"micro"`` off the gradient accumulation boundary, ``"boundary"`` on it.
        outputs: what the program writes, by names such as ``"parameter/wte.weight"``.
        rows: its latest forward that autograd recorded, to be looked at again; None without one,
            or where each row counts the same on any number of devices.
        summed: autograd's node that sums the rows of what the engine returned into the loss that
            its `backward` was given; None where none is seen to.
    """

    kind: str
    outputs: Mapping[str, torch.Tensor]
    rows: RepeatedRows | None = None
    summed: str | None = None

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of what the text and the annotated program return, in order."""
        names = list(self.outputs)
        return tuple(names[place] for place in programs.returned(list(self.outputs.values())))

    def hlo(self) -> str:
        """Compiles what is pending, without running it: optimised, partitioned HLO text."""
        return self._optimized

    @functools.cached_property
    def _optimized(self) -> str:
        # Compiled once for all who look at the same graph.
        return programs.optimized_hlo(list(self.outputs.values()))

    def annotated(self) -> AnnotatedProgram:
        """What is pending, annotated: not partitioned, not optimised."""
        return programs.annotated(list(self.outputs.values()))
