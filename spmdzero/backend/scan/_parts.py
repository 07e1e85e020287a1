"""What a backend does for loops."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from spmdzero.backend.replica import GatheredAtUse, Quirks
from spmdzero.backend.replica._gathered import Shard


@dataclasses.dataclass(frozen=True)
class Form:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """Those of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)


class Run(Protocol):
    """Runs a function again and again."""

    def __call__(
        self,
        function: Any,
        tensors: Sequence[torch.Tensor],
        *,
        times: int,
        backwards: bool,
        arrangement: tuple[int, ...],
        carried: tuple[Form, ...],
        sliced: tuple[Form, ...],
        whole: tuple[Form, ...],
        made: tuple[Form, ...],
    ) -> list[torch.Tensor]:
        """The last carried values, and stacks `[times, ...]` of what the iterations made.

        Args:
            function: of one iteration, folded; returns what is carried on, and what it makes.
            tensors: what is carried into the first iteration, stacks `[times, ...]`, and what is
                the same in each.
            times: iterations.
            backwards: they run from the last slice to the first.
            arrangement: for each parameter of the function's program its place among the tensors.
            carried: of the first tensors; each iteration replaces them.
            sliced: of a slice of those that follow.
            whole: of the last.
            made: of what an iteration makes.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loops:
    """How the programs of a backend loop.

    Attributes:
        run: makes the loop one operation.
        quirks: where the backend's operations differ from torch's.
        inside: what stands between the region's dispatch mode and the module.
    """

    run: Run
    quirks: Quirks
    inside: Callable[[], contextlib.AbstractContextManager[Any]]


def shards_of(
    parameters: Mapping[str, torch.Tensor], gathered: GatheredAtUse | None
) -> dict[str, Shard]:
    """By name, of a block's parameters those that rest as shards."""
    if gathered is None:
        return {}
    found = {name: gathered.shard_of(parameter) for name, parameter in parameters.items()}
    return {name: shard for name, shard in found.items() if shard is not None}
