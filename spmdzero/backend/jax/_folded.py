"""Functions of tensors, recorded once with stand-ins for their inputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from spmdzero.backend.jax import _host
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._generator import generator
from spmdzero.backend.jax._graph import Folded, Graph
from spmdzero.backend.jax._tensor import over
from spmdzero.backend.jax._values import Space, Value, record
from spmdzero.backend.jax._versions import wide_numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An array that a folded function reads beside its inputs.

    Attributes:
        tensor: over it.
        is_seed: whether it is the seed of the devices' own generator.
    """

    tensor: torch.Tensor
    is_seed: bool = False

    @property
    def handle(self) -> int:
        """Tells it apart from others."""
        return value_of(self.tensor).serial


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoldedFunction:
    """A function of tensors, recorded once.

    Attributes:
        graph: what it computes.
        constants: what it reads beside its inputs.
        arguments: the index of an input, or a constant, for each input of the graph.
    """

    graph: Graph
    constants: tuple[Constant, ...]
    arguments: tuple[int | torch.Tensor, ...]

    @property
    def proto(self) -> bytes:
        """Equal for functions that compute the same."""
        return self.graph.key

    @property
    def reads(self) -> frozenset[int]:
        """The inputs that it depends on."""
        return frozenset(a for a in self.arguments if isinstance(a, int))

    @property
    def arrangement(self) -> tuple[int | None, ...]:
        """For each input of the graph the index of one of the function's; None for a constant."""
        return tuple(a if isinstance(a, int) else None for a in self.arguments)

    def renumbered(self, moved: Mapping[int, int]) -> "FoldedFunction":
        """The function of inputs in another order: old index -> new, for those that it reads."""
        arguments = tuple(moved[a] if isinstance(a, int) else a for a in self.arguments)
        return dataclasses.replace(self, arguments=arguments)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the function returns for `inputs`, pending."""
        given = self.given(inputs)
        if self.seeds:
            seed = _host.seed(generator.take())
            given = [seed if place in self.seeds else v for place, v in enumerate(given)]
        forms = [(slot.shape, slot.dtype) for slot in self.graph.outputs]
        outputs = record(Folded(self.graph.key, self.graph), tuple(given), {}, forms)
        return [over(value) for value in outputs]

    @property
    def seeds(self) -> frozenset[int]:
        """The graph's inputs that are another seed each time."""
        own = {id(constant.tensor) for constant in self.constants if constant.is_seed}
        return frozenset(i for i, a in enumerate(self.arguments) if id(a) in own)

    def given(self, inputs: Sequence[torch.Tensor]) -> list[Value]:
        """The values of the graph's inputs."""
        return [value_of(inputs[a] if isinstance(a, int) else a) for a in self.arguments]

    def sharing(self, others: Sequence[Constant]) -> "FoldedFunction":
        """This function, which reads one of `others` where it has an equal constant of its own."""
        found = {
            id(own.tensor): other
            for own in self.constants
            for other in others
            if not (own.is_seed or other.is_seed) and same_value(own.tensor, other.tensor)
        }
        return dataclasses.replace(
            self,
            constants=tuple(found.get(id(own.tensor), own) for own in self.constants),
            arguments=tuple(
                found[id(a)].tensor if not isinstance(a, int) and id(a) in found else a
                for a in self.arguments
            ),
        )


def same_value(mine: torch.Tensor, its: torch.Tensor) -> bool:
    """Whether two tensors on the devices, both computed, are equal; NaN equals NaN."""
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return False
    one, other = value_of(mine), value_of(its)
    if one is other:
        return True
    with wide_numbers():
        first, second = _host.gathered(one.array), _host.gathered(other.array)
    return bool(np.all((first == second) | ((first != first) & (second != second))))


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data, for `fold`'s `more`: it can only be computed with."""
    return over(Value(shape, dtype, Space.GLOBAL, stand_in=True))


def fold(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *,
    more: Sequence[torch.Tensor] = (),
) -> FoldedFunction:
    """Records `function` with stand-ins for `inputs`, which have their shapes and dtypes only.

    Args:
        function: pure: writes nothing that outlives it. Returns at least one tensor; what it
            returns is not an input.
        inputs: tensors like those of later calls.
        more: further inputs, of which `function` finds out only while it is recorded: it appends a
            `stand_in` for each.
    """
    empty = [stand_in(tensor.shape, tensor.dtype) for tensor in inputs]
    given = [value_of(tensor) for tensor in empty]
    with generator.folding() as seed:
        outputs = function([over(value) for value in given])
    graph, leaves = Graph.of([value_of(output) for output in outputs])
    numbers = {id(value): index for index, value in enumerate(given)}
    numbers |= {id(value_of(tensor)): len(given) + i for i, tensor in enumerate(more)}
    constants = {
        id(v): Constant(over(_host.seed(0)), is_seed=True) if v is seed else Constant(over(v))
        for v in leaves
        if id(v) not in numbers
    }
    return FoldedFunction(
        graph=graph,
        constants=tuple(constants.values()),
        arguments=tuple(
            numbers[id(v)] if id(v) in numbers else constants[id(v)].tensor for v in leaves
        ),
    )
