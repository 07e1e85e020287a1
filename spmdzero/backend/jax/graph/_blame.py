"""Finds the operation of a graph that JAX can't lower, after lowering the graph has failed."""

import jax

from spmdzero.backend.forms._tree import found
from spmdzero.backend.jax.graph._graph import Graph, Slot, Step
from spmdzero.backend.jax.graph._lowered import alone, refusal
from spmdzero.backend.jax.graph._operations import AtenOp
from spmdzero.errors import SpmdZeroRuntimeError


class UnloweredError(SpmdZeroRuntimeError):
    """An error of JAX in lowering a graph.

    Attributes:
        outputs: numbers of the graph's outputs that need the operation.
    """

    outputs: tuple[int, ...] = ()


def blamed(graph: Graph, error: Exception) -> UnloweredError:
    """The error that names the operation, and the user's line."""
    for step in graph.steps:
        if not isinstance(step.op, AtenOp):
            continue
        forms = [(slot.shape, slot.dtype) for slot in step.made]
        try:
            function, shapes = alone(step.op, (step.args, step.kwargs), forms, Slot)
            jax.jit(function).lower(*shapes)
        except Exception as cause:
            at = "{}:{}: ".format(*step.place) if step.place else ""
            found = UnloweredError(at + refusal(step.op, cause))
            found.outputs = _needing(graph, step)
            return found
    return UnloweredError(f"JAX can't lower the program: {type(error).__name__}: {error}")


def _needing(graph: Graph, culprit: Step) -> tuple[int, ...]:
    needing = {slot.number for slot in culprit.made}
    for step in graph.steps:
        if any(slot.number in needing for slot in found((step.args, step.kwargs), Slot)):
            needing |= {slot.number for slot in step.made}
    return tuple(n for n, slot in enumerate(graph.outputs) if slot.number in needing)
