"""Functions of tensors, recorded once with stand-ins for their inputs."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.graph._graph import Folded, Graph
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._dispatch import own_values, value_of
from spmdzero.backend.jax.lazy._generator import generator
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Space, Value, record
from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.errors import SpmdZeroRuntimeError


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """The program of a folded function.

    Attributes:
        graph: the operations.
    """

    graph: Graph

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The pending results of the function; `tensors` has one for each input of the graph."""
        given = tuple(own_values(tensors))
        forms = [(slot.shape, slot.dtype) for slot in self.graph.outputs]
        outputs = record(Folded(self.graph.key, self.graph), given, {}, forms, values=given)
        return [over(value) for value in outputs]


def same_value(mine: torch.Tensor, its: torch.Tensor) -> bool:
    """Whether two computed tensors on the devices are equal; NaN equals NaN."""
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return False
    one, other = value_of(mine), value_of(its)
    if one is other:
        return True
    with wide_numbers():
        first, second = _host.gathered(one.array), _host.gathered(other.array)
    return bool(np.all((first == second) | ((first != first) & (second != second))))


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data for `more` of `fold`: it can only take part in computations."""
    return over(Value(shape, dtype, Space.GLOBAL, stand_in=True))


def fold(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *,
    more: Sequence[torch.Tensor] = (),
) -> FoldedFunction:
    """Records `function` with stand-ins for `inputs`, which have only their shapes and dtypes.

    Args:
        function: pure: it writes nothing that outlives it. It returns at least one tensor, and
            never an input itself.
        inputs: tensors like those of later calls.
        more: further inputs, which `function` discovers only while it is recorded: it appends a
            `stand_in` for each.

    Raises:
        SpmdZeroRuntimeError: it draws from the devices' own generator, outside of `drawing`.
    """
    empty = [stand_in(tensor.shape, tensor.dtype) for tensor in inputs]
    given = [value_of(tensor) for tensor in empty]
    with generator.folding() as seed:
        outputs = function([over(value) for value in given])
    graph, leaves = Graph.of([value_of(output) for output in outputs])
    numbers = {id(value): index for index, value in enumerate(given)}
    numbers |= {id(value_of(tensor)): len(given) + i for i, tensor in enumerate(more)}
    if any(value is seed for value in leaves):
        # Each call would draw the same numbers.
        raise SpmdZeroRuntimeError("a random number is drawn from the devices' own generator")
    constants = {id(v): over(v) for v in leaves if id(v) not in numbers}
    return FoldedFunction(
        proto=graph.key,
        body=Recorded(graph),
        constants=tuple(constants.values()),
        arguments=tuple(numbers[id(v)] if id(v) in numbers else constants[id(v)] for v in leaves),
    )
