"""Compiling a folded function as a program of its own, which starts without being recorded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend.jax import _host
from spmdzero.backend.jax._dispatch import own_values, value_of
from spmdzero.backend.jax._donation import in_order
from spmdzero.backend.jax._execute import Executable, compilations
from spmdzero.backend.jax._folded import Recorded
from spmdzero.backend.jax._generator import generator
from spmdzero.backend.jax._graph_function import marked_spec
from spmdzero.backend.jax._memory import copied
from spmdzero.backend.jax._results import Results
from spmdzero.backend.jax._uploads import given
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.protocols._compiler import FoldedFunction


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """A compiled program and the arrangement of its inputs and outputs.

    Attributes:
        program: JAX's executable.
        inputs: for each input the index of a source, or after them of a constant.
        constants: arrays.
        donated: numbers of the inputs that are donated, each with the index of its source.
        results: the outputs of the function.
        seeds: numbers of the inputs that take a new seed at each run.
    """

    program: Executable
    inputs: tuple[int, ...]
    constants: tuple[Any, ...]
    donated: tuple[tuple[int, int], ...]
    results: Results
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
        values = own_values(sources)
        pool = [*given(values), *self.constants]
        arrays = [pool[index] for index in self.inputs]
        # Another tensor shares this memory, such as one that was a copy of it.
        for place in [place for place, index in self.donated if values[index].holders > 1]:
            with wide_numbers():
                arrays[place] = copied(arrays[place])
        if self.seeds:
            seed = _host.seed(generator.take()).array
            arrays = [seed if place in self.seeds else a for place, a in enumerate(arrays)]
        return self.results.held(self.program.run(arrays), into)


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
    takes = {output: place_of[source] for output, source in donated.items() if source in place_of}
    recorded: Recorded = function.body
    graph = recorded.graph
    count = len(graph.outputs)
    order = in_order(takes, count)
    ordered = graph.ordered(order)
    shardings = marked_spec(ordered, compilations.mesh)
    for place, index in enumerate(order):
        if index in takes:
            shardings[place] = values[takes[index]].sharding
    numbers = tuple(sorted(takes.values()))
    program = compilations.executable(
        ordered, [value.array for value in values], donated=numbers, shardings=shardings
    )
    fixed = [v.array for a, v in zip(arguments, values, strict=True) if not isinstance(a, int)]
    constants = iter(range(len(sources), len(sources) + len(fixed)))
    inputs = tuple([a if isinstance(a, int) else next(constants) for a in arguments])
    return CompiledProgram(
        program=program,
        inputs=inputs,
        constants=tuple(fixed),
        donated=tuple([(place, inputs[place]) for place in numbers]),
        results=Results(
            places=tuple([order.index(index) for index in range(len(graph.outputs))]),
            shapes=tuple([(tuple(slot.shape), slot.dtype) for slot in graph.outputs]),
        ),
        seeds=recorded.seeds,
    )
