"""A step's pending program, as observers see it before it is compiled."""

import dataclasses
import functools
from collections.abc import Mapping

import torch

from spmdzero.backend import current, programs
from spmdzero.engine._repeated_rows import RepeatedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One program that the engine is about to run.

    Attributes:
        kind: ``"boundary"`` at the gradient accumulation boundary, ``"micro"`` before it.
        outputs: the tensors that the program writes, by names such as ``"parameter/wte.weight"``.
        rows: the latest forward that autograd recorded, to be run again; None without one, or if
            each row counts the same on any number of devices.
        summed: name of autograd's node that sums the rows of the engine's outputs into the loss
            that was passed to `backward`; None if no such node was found.
    """

    kind: str
    outputs: Mapping[str, torch.Tensor]
    rows: RepeatedRows | None = None
    summed: str | None = None

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the outputs of the text and of the annotated program, in order."""
        names = list(self.outputs)
        return tuple(names[place] for place in programs.returned(list(self.outputs.values())))

    def hlo(self) -> str:
        """Compiles the pending program without running it; returns optimised HLO, partitioned."""
        return self._optimized

    @functools.cached_property
    def _optimized(self) -> str:
        # Compiled once for all observers of the same graph.
        return programs.optimized_hlo(list(self.outputs.values()))

    def annotated(self) -> bytes | None:
        """The pending program, neither partitioned nor optimised: see `Lowering`.

        None by a backend that can't hand it to another compiler.
        """
        lowering = current().lowering
        return None if lowering is None else lowering.annotated(list(self.outputs.values()))
