"""The interface of a backend for loops."""

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
        """The form of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)


class Run(Protocol):
    """Runs a function repeatedly."""

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
        """The last carried values, and stacks `[times, ...]` of the iterations' results.

        Args:
            function: one folded iteration; returns the carried values and its results.
            tensors: values carried into the first iteration, stacks `[times, ...]`, and tensors
                that are the same in each iteration.
            times: number of iterations.
            backwards: whether they run from the last slice to the first.
            arrangement: for each parameter of the function's program its index in the tensors.
            carried: forms of the first tensors, which each iteration replaces.
            sliced: forms of a slice of the stacks that follow.
            whole: forms of the last tensors.
            made: forms of an iteration's results.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loops:
    """The loops in a backend's programs.

    Attributes:
        run: runs a loop as one operation.
        quirks: differences between the backend's operations and torch's.
        inside: makes a context between the region's dispatch mode and the module.
    """

    run: Run
    quirks: Quirks
    inside: Callable[[], contextlib.AbstractContextManager[Any]]


def shards_of(
    parameters: Mapping[str, torch.Tensor], gathered: GatheredAtUse | None
) -> dict[str, Shard]:
    """Names those of a block's parameters that rest as shards."""
    if gathered is None:
        return {}
    found = {name: gathered.shard_of(parameter) for name, parameter in parameters.items()}
    return {name: shard for name, shard in found.items() if shard is not None}
