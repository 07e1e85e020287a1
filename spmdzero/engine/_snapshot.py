"""A step's pending program, for those who want to see what is compiled."""

import dataclasses
import functools
from collections.abc import Mapping

import torch

from spmdzero.backend.torch_xla import AnnotatedProgram, annotated_program, optimized_hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One program that the engine is about to run.

    Attributes:
        kind: ``"micro"`` off the gradient accumulation boundary, ``"boundary"`` on it.
        outputs: what the program writes, by names such as ``"parameter/wte.weight"``.
    """

    kind: str
    outputs: Mapping[str, torch.Tensor]

    def hlo(self) -> str:
        """Compiles what is pending, without running it: optimised, partitioned HLO text."""
        return self._optimized

    @functools.cached_property
    def _optimized(self) -> str:
        # Compiled once for all who look at the same graph.
        return optimized_hlo(list(self.outputs.values()))

    def annotated(self) -> AnnotatedProgram:
        """What is pending, annotated: not partitioned, not optimised."""
        proto, _ = annotated_program(list(self.outputs.values()))
        return AnnotatedProgram(proto=proto, input_shardings={})
