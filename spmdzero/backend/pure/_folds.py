"""Folds functions of tensors once, and calls them at each step."""

from collections.abc import Callable, Hashable, Sequence

import torch

from spmdzero.backend._current import arrays, compiler, current
from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.protocols._mesh import Mesh

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Folds:
    """Calls functions, folded if that is wanted.

    Attributes:
        wanted: whether the next calls are folded.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._folded: dict[Hashable, FoldedFunction] = {}

    @classmethod
    def of_few(cls, mesh: Mesh) -> "Folds":
        """Folds functions of few operations of a loss.

        It pays only where Python records operations, and needs a loss that all hosts have.
        """
        folds = cls()
        folds.wanted = current().compiler is not None and mesh.across is None
        return folds

    def __call__(
        self, key: Hashable, function: Function, inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Calls `function(inputs)`, as one operation if that is wanted.

        Args:
            key: functions with the same key do the same with tensors of the same shapes and dtypes.
            function: see `spmdzero.backend.Compiler`.
            inputs: tensors, which may be pending.
        """
        if not self.wanted:
            return function(inputs)
        # Ask the backend: torch would ask a tensor's class for each of them.
        form = key, tuple(arrays.shapes_of(inputs))
        if form not in self._folded:
            with compiler.no_stand_in_left():
                self._folded[form] = compiler.fold(function, inputs)
        return self._folded[form](inputs)
