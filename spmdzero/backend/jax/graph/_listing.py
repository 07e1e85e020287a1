"""A graph as text in the style of HLO, with the user's line of each operation.

It is made for people and for comparisons: JAX's own text of an uncompiled program names lines of
the interpreter.
"""

from typing import Any

import torch

from spmdzero.backend.forms._tree import found
from spmdzero.backend.jax.graph._graph import Graph, Slot, Step

_KINDS = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "s"))
# Operations that take a part of a tensor are all listed as slices.
_SLICES = {"aten.slice.Tensor", "aten.select.int", "aten.narrow.default", "aten.unbind.int"}


def listing(graph: Graph) -> str:
    """One line for each input and each operation of `graph`."""
    inputs = [f"  {_made(slot)} parameter({i})" for i, slot in enumerate(graph.inputs)]
    return "\n".join([*inputs, *map(_line, graph.steps)])


def _line(step: Step) -> str:
    made = ", ".join(_made(slot) for slot in step.made[:1]) or "%nothing.0 = ()"
    operands = ", ".join(
        f"{_form(slot)} %v.{slot.number}" for slot in found([step.args, step.kwargs], Slot)
    )
    said = ", ".join(_said([*step.args, *dict(step.kwargs).values()]))
    line = f"  {made} {_operation(step.op.key)}({operands}), with={{{said}}}"
    if step.place is None:
        return line
    file, number = step.place
    return f'{line}, metadata={{source_file="{file}" source_line={number}}}'


def _operation(key: Any) -> str:
    if key in _SLICES:
        return "slice"
    if isinstance(key, str):
        return key.split(".")[1].strip("_")
    return {"loop": "while"}.get(key[0], str(key[0]))


def _said(tree: Any) -> list[str]:
    """Texts of an operation's arguments that are not tensors."""
    if isinstance(tree, Slot):
        return []
    if isinstance(tree, list | tuple):
        return [word for item in tree for word in _said(item)]
    return [str(tree)]


def _made(slot: Slot) -> str:
    return f"%v.{slot.number} = {_form(slot)}"


def _form(slot: Slot) -> str:
    return f"{_short(slot.dtype)}[{','.join(map(str, slot.shape))}]"


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for kind, short in _KINDS:
        if name.startswith(kind):
            return short + name.removeprefix(kind)
    return "pred" if name == "bool" else name
