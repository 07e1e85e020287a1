"""The end of a micro-batch as a pure function of named tensors."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from spmdzero.backend.pure import Folds
from spmdzero.step._boundary import Boundary
from spmdzero.step._gradient_path import GradientPath

Named = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ending:
    """Ends a micro-batch after its backward; it is a function that writes nothing.

    The state has names: ``"parameter/<name>"``, ``"accumulator/<name>"``, the names for `Boundary`.

    Attributes:
        path: the path of gradients to the boundary.
        boundary: ends the step; None if the micro-batch doesn't end it.
        checks: whether a non-finite loss keeps the step from applying.
    """

    path: GradientPath
    boundary: Boundary | None
    checks: bool

    def __call__(
        self,
        state: Named,
        gradients: Named,
        numbers: Sequence[torch.Tensor],
        *,
        finite: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The tensors of the state that a micro-batch changes after its backward.

        Args:
            state: the state, with what the forward wrote.
            gradients: those of the micro-batch, in their waiting form.
            numbers: the host's uploads for `Boundary`.
            finite: whether all losses of the step were finite, 0-dim.
        """
        waiting = {f"accumulator/{name}": grad for name, grad in gradients.items()}
        for name, grad in waiting.items():
            if name in state:
                waiting[name] = self.path.plus(_after(name), state[name], grad)
        if self.boundary is None:
            return waiting
        waiting = {**state, **waiting}
        new = self.boundary(
            state,
            gradients={
                name: self.path.final(name, waiting.get(f"accumulator/{name}"))
                for name in self.boundary.names
            },
            numbers=numbers,
            finite=finite if self.checks else None,
            call=Folds(),
        )
        accumulators = [name for name in state if name.startswith("accumulator/")]
        return new | {name: self.path.zeros(_after(name)) for name in accumulators}


def _after(name: str) -> str:
    return name.partition("/")[2]
