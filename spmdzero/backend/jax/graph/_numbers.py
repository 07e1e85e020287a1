"""Python's floats in the operations of a graph, turned into an input of its program.

A float is a constant of the program at first, which XLA folds. A float that changes at the next
step, as the step size of a user's optimizer, would need another program at each step.
"""

import dataclasses
from typing import Any

import numpy as np
import torch

from spmdzero.backend.forms._tree import mapped
from spmdzero.backend.jax.graph._graph import Graph, Slot, Step
from spmdzero.backend.jax.graph._operations import AtenOp, MeshOp
from spmdzero.backend.jax.lazy._values import Space
from spmdzero.backend.jax.ops import Number

# Operations that take a float as they take a tensor. In others a float decides what is computed, as
# a dropout's rate does.
_TAKE_THEM = frozenset(
    {
        f"aten.{name}"
        for name in (
            "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar",
            "mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "addcmul.default",
            "addcdiv.default", "lerp.Scalar", "full.default", "full_like.default",
            "scalar_tensor.default", "fill.Scalar",
        )
    }
)  # fmt: skip


class NumberSlot(Slot):
    """The slot of a float, which operations take as they take Python's floats."""


def with_numbers(graph: Graph) -> tuple[Graph, np.ndarray]:
    """The graph with its operations' floats as a last input, `[count]` fp64, and the floats.

    Graphs that differ only in floats then have the same key.
    """
    found: list[float] = []
    first = 1 + max((s.number for step in graph.steps for s in step.made), default=0)
    first = max(first, 1 + max((slot.number for slot in graph.inputs), default=0))

    def opened(number: float | Slot) -> Slot:
        if isinstance(number, Slot):
            return number
        found.append(number)
        return NumberSlot(first + len(found), (), torch.float64, Space.NEUTRAL)

    steps = [
        dataclasses.replace(
            step,
            args=mapped(step.args, (float, Slot), opened),
            kwargs=mapped(step.kwargs, (float, Slot), opened),
        )
        if isinstance(step.op, AtenOp) and step.op.name in _TAKE_THEM
        else step
        for step in graph.steps
    ]
    numbers = np.array(found, np.float64)
    given = Slot(first, numbers.shape, torch.float64, Space.NEUTRAL)
    taken = [
        Step(
            MeshOp(("number", place), lambda array, place=place: array[place]),
            (given,),
            {},
            (NumberSlot(first + 1 + place, (), torch.float64, Space.NEUTRAL),),
            Space.NEUTRAL,
            (),
            None,
        )
        for place in range(len(found))
    ]
    return Graph((*graph.inputs, given), graph.outputs, (*taken, *steps)), numbers


def as_taken(slot: Slot, array: Any) -> Any:
    """The argument that an operation receives for a slot."""
    return Number(array) if isinstance(slot, NumberSlot) else array
