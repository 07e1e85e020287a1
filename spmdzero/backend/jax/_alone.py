"""Compiling a folded function as a program of its own, which starts without being recorded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend.jax import _host
from spmdzero.backend.jax._dispatch import own_value, value_of
from spmdzero.backend.jax._donation import in_order
from spmdzero.backend.jax._execute import Executable, compilations
from spmdzero.backend.jax._folded import Recorded
from spmdzero.backend.jax._generator import generator
from spmdzero.backend.jax._graph_function import marked_spec
from spmdzero.backend.jax._memory import copied
from spmdzero.backend.jax._values import Space, Value
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax._writes import holding
from spmdzero.backend.protocols._compiler import FoldedFunction


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """A compiled program and the arrangement of its inputs and outputs.

    Attributes:
        program: JAX's executable.
        inputs: for each input the index of a source, or an array.
        donated: numbers of the inputs that are donated.
        outputs: for each output of the function its index among the program's outputs.
        forms: shape and dtype of each output of the function.
        seeds: numbers of the inputs that take a new seed at each run.
    """

    program: Executable
    inputs: tuple[int | Any, ...]
    donated: tuple[int, ...]
    outputs: tuple[int, ...]
    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    seeds: frozenset[int]

    def run(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Starts the program; the donated tensors of `sources` are gone afterwards.

        Args:
            sources: the arguments, on the devices.
            into: for each output of the function the tensor that takes it, or None for a new one.

        Returns the function's outputs; the devices may still be computing them.
        """
        values = [own_value(source) for source in sources]
        arrays = [values[i].array if isinstance(i, int) else i for i in self.inputs]
        for place in self.donated:
            index = self.inputs[place]
            assert isinstance(index, int)
            if values[index].holders > 1:
                # Another tensor shares this memory, such as one that was a copy of it.
                with wide_numbers():
                    arrays[place] = copied(arrays[place])
        if self.seeds:
            seed = _host.seed(generator.take()).array
            arrays = [seed if place in self.seeds else a for place, a in enumerate(arrays)]
        results = self.program.run(arrays)
        return [
            holding(Value(shape, dtype, Space.GLOBAL, array=results[place]), target)
            for place, (shape, dtype), target in zip(self.outputs, self.forms, into, strict=True)
        ]


def compile_alone(
    function: FoldedFunction,
    sources: Sequence[torch.Tensor],
    *,
    donated: Mapping[int, int],
    state: int,
) -> CompiledProgram:
    """Compiles `function` as a program of its own, unless it is compiled already.

    Args:
        function: a folded function.
        sources: the arguments of the first run, none of them pending.
        donated: output -> the source whose memory the output takes, of the same size.
        state: the first `state` sources outlive the program, and share no memory.
    """
    arguments = function.arguments
    values = [*map(value_of, function.given(sources))]
    place_of = {a: place for place, a in enumerate(arguments) if isinstance(a, int)}
    given = {output: place_of[source] for output, source in donated.items() if source in place_of}
    recorded: Recorded = function.body
    graph = recorded.graph
    count = len(graph.outputs)
    order = in_order(given, count)
    ordered = graph.ordered(order)
    shardings = marked_spec(ordered, compilations.mesh)
    for place, index in enumerate(order):
        if index in given:
            shardings[place] = values[given[index]].array.sharding
    numbers = tuple(sorted(given.values()))
    program = compilations.executable(
        ordered, [value.array for value in values], donated=numbers, shardings=shardings
    )
    return CompiledProgram(
        program=program,
        inputs=tuple(
            a if isinstance(a, int) else value.array
            for a, value in zip(arguments, values, strict=True)
        ),
        donated=numbers,
        outputs=tuple(order.index(index) for index in range(count)),
        forms=tuple((tuple(slot.shape), slot.dtype) for slot in graph.outputs),
        seeds=recorded.seeds,
    )
