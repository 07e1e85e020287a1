"""Whether a loss that a script computes of an engine's outputs is a sum over their rows.

It can't be computed again with other rows, as a loss of the model's own can. So autograd's graph is
read: which of its nodes takes the batch dim away, and whether anything may divide afterwards.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

# Of a node's outputs, by number: the batch dim.
Batches = Mapping[int, int]
# What a tensor is: the batch dim of one that has rows, the node that made a sum over them, or None
# for anything else, a mean for example.
_Content = int | str | None
# What a sum stays a sum in.
_KEEPS = {
    "Add", "Alias", "Cat", "Clone", "Crossing", "Expand", "Mean", "Neg", "Reshape", "ReshapeAlias",
    "Select", "Squeeze", "Stack", "Sub", "Sum", "ToCopy", "UnsafeView", "Unsqueeze", "View",
    "_Deferring", "_Reading", "_ToHost", "_Undeferring",
}  # fmt: skip


def summed_by(loss: torch.Tensor, batches_of: Callable[[Any], Batches | None]) -> str | None:
    """The node that sums the rows of an engine's outputs into `loss`; None where none does.

    A sum that is multiplied or divided afterwards may be a mean, and counts as one.

    Args:
        loss: with its graph.
        batches_of: of a node that made an engine's outputs, which are batches; None of others.
    """
    found: dict[Any, _Content] = {}

    def content(node: Any, number: int) -> _Content:
        batches = batches_of(node)
        return found.get(node) if batches is None else batches.get(number)

    waiting = [(loss.grad_fn, False)]
    while waiting:
        node, ready = waiting.pop()
        if node is None or node in found or batches_of(node) is not None:
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if ready:
            found[node] = _made(node, {content(*edge) for edge in edges} - {None})
        else:
            waiting += [(node, True), *((before, False) for before, _ in edges)]
    end = content(loss.grad_fn, loss.output_nr)
    return end if isinstance(end, str) else None


def _made(node: Any, contents: set[Any]) -> _Content:
    """What a node makes of tensors with these contents."""
    if len(contents) != 1:
        return None
    (content,), kind = contents, node.name().partition("Backward")[0]
    if isinstance(content, str):
        return content if kind in _KEEPS else None
    reduction = getattr(node, "_saved_reduction", 0)
    if reduction:
        return node.name() if reduction == 2 else None
    if kind not in ("Mean", "Select", "Sum") or not _takes(node, content):
        return content
    return node.name() if kind == "Sum" else None


def _takes(node: Any, batch: int) -> bool:
    """Whether a node is over the batch dim, among others."""
    dims = getattr(node, "_saved_dim", ())
    dims = (dims,) if isinstance(dims, int) else dims
    rank = len(node._saved_self_sym_sizes)
    # autograd keeps a negative number as the unsigned one of the same bits.
    return not dims or any((d - 2**64 if d >= 2**63 else d) % rank == batch for d in dims)
