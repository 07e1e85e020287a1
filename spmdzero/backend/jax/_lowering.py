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
    values = [value_of(tensor) for tensor in tensors]
    unique = list({id(value): value for value in values if value.node is not None}.values())
    graph, leaves = Graph.of(unique)
    shardings = marked_spec(graph, compilations.mesh)
    donated = donated_inputs(graph, leaves, shardings)
    return compilations.lower(
        graph,
        [leaf.array for leaf in leaves],
        donated=donated,
        shardings=shardings,
        platform=runtime.program_platform(),
    )


def annotated(tensors: Sequence[torch.Tensor]) -> AnnotatedProgram:
    """The program that computes `tensors`, as it is handed to the compiler."""
    bytecode = io.BytesIO()
    # The lines and scopes of operations are in the bytecode as they are in the module.
    lowered(tensors).compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    return AnnotatedProgram(module=bytecode.getvalue(), is_stablehlo=True)
