"""Compiling a folded function as a program of its own, which starts without being recorded."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from spmdzero.backend.jax.graph._donation import in_order
from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.graph._folded import Recorded
from spmdzero.backend.jax.graph._graph_function import marked_spec
from spmdzero.backend.jax.graph._replay import Replay
from spmdzero.backend.jax.lazy._dispatch import own_values, value_of
from spmdzero.backend.jax.lazy._values import Value
from spmdzero.backend.protocols._compiler import FoldedFunction


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """A compiled function of tensors.

    Attributes:
        replay: starts it with the arguments and, after them, `constants`.
        constants: values that it reads beside its arguments.
    """

    replay: Replay
    constants: tuple[Value, ...]

    def run(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Starts the program; the donated tensors of `sources` are gone afterwards.

        Args:
            sources: the arguments, on the devices.
            into: for each output of the function the tensor that takes it, or None for a new one.

        Returns the function's outputs; the devices may still be computing them.
        """
        pool = [*own_values(sources), *self.constants]
        outputs = self.replay.started([pool[index] for index in self.replay.inputs])
        return self.replay.held(outputs, into)


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
    fixed = [v for a, v in zip(arguments, values, strict=True) if not isinstance(a, int)]
    constants = iter(range(len(sources), len(sources) + len(fixed)))
    replay = Replay(
        program=program,
        inputs=tuple([a if isinstance(a, int) else next(constants) for a in arguments]),
        donated=tuple([(place, True) for place in numbers]),
        places=tuple([order.index(index) for index in range(count)]),
        shapes=tuple([(tuple(slot.shape), slot.dtype) for slot in graph.outputs]),
        seeds=recorded.seeds,
    )
    return CompiledProgram(replay=replay, constants=tuple(fixed))
