"""The indices with which a pending value is computed outside of the replica region."""

import dataclasses

import torch

from spmdzero.backend.forms._indices import LABEL, IndexRange, indexed_by
from spmdzero.backend.jax.graph._operations import AtenOp, MeshOp
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Node, Space, Value


def indices_behind(tensor: torch.Tensor) -> list[tuple[torch.Tensor, IndexRange, str]]:
    """The tensors of indices, their ranges, and the user's lines; see `Arrays.indices_behind`."""
    # What is computed in a region is watched there; a folded function is one operation here.
    waiting, seen = [value_of(tensor).node], set[int]()
    found: list[tuple[torch.Tensor, IndexRange, str]] = []
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen or node.space is Space.REPLICA:
            continue
        seen.add(id(node))
        if isinstance(node.op, AtenOp):
            found += _of(node, node.op.name)
        elif not isinstance(node.op, MeshOp):
            continue
        waiting += [value.node for value in node.values]
    return found


def _of(node: Node, name: str) -> list[tuple[torch.Tensor, IndexRange, str]]:
    # torch takes a loss of labels apart into a gather, whose index has no ignored label any more.
    of_loss = any("nll_loss" in name for name in node.scope)
    line = "{}:{}".format(*node.place) if node.place else "in what is computed of the outputs"
    return [
        (over(index), dataclasses.replace(allowed, what=LABEL) if of_loss else allowed, line)
        for index, allowed in indexed_by(name.split(".")[1], node.args)
        if isinstance(index, Value)
    ]
