"""Programs of tensors, lowered but not compiled."""

import io
from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.backend._programs import AnnotatedProgram
from spmdzero.backend.jax import runtime
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._execute import compilations, donated_inputs
from spmdzero.backend.jax._graph import Graph
from spmdzero.backend.jax._program import marked_spec


def lowered(tensors: Sequence[torch.Tensor]) -> Any:
    """What JAX makes of the program that computes `tensors`, for `runtime.program_platform`."""
    graph, leaves = Graph.of([value_of(tensors[place]) for place in returned(tensors)])
    shardings = marked_spec(graph, compilations.mesh)
    donated = donated_inputs(graph, leaves, shardings)
    platform = runtime.program_platform()
    return compilations.lower(
        graph,
        [leaf.array for leaf in leaves],
        donated=donated,
        shardings=shardings,
        platform=None if platform == runtime.platform() else platform,
    )


def returned(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which of `tensors` these programs of them return, in order: each that is pending, once."""
    values = [value_of(tensor) for tensor in tensors]
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        if value.node is not None:
            places.setdefault(id(value), place)
    return list(places.values())


def annotated(tensors: Sequence[torch.Tensor]) -> AnnotatedProgram:
    """The program that computes `tensors`, as it is handed to the compiler."""
    bytecode = io.BytesIO()
    # The lines and scopes of operations are in the bytecode as they are in the module.
    lowered(tensors).compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    return AnnotatedProgram(module=bytecode.getvalue(), is_stablehlo=True)
