"""A step's pending program, as text, for those who want to see what was compiled."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch

from spmdzero.xla import optimized_hlo, record_scopes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One program that the engine is about to run.

    Attributes:
        kind: ``"micro"`` off the gradient accumulation boundary, ``"boundary"`` on it.
        hlo: optimised, partitioned HLO text.
        outputs: what the program writes, e.g. ``"parameter/wte.weight"``, in HLO's order.
    """

    kind: str
    hlo: str
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, roots: Mapping[str, torch.Tensor]) -> "StepGraph":
        """Compiles (without running) what is pending for `roots`."""
        return cls(kind=kind, hlo=optimized_hlo(list(roots.values())), outputs=tuple(roots))

    @staticmethod
    @contextlib.contextmanager
    def recording() -> Iterator[None]:
        """Operations traced inside keep the names of the tensors that they serve."""
        record_scopes(True)
        try:
            yield
        finally:
            record_scopes(False)
