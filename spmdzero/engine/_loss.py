"""Finds and checks the inputs and the loss of a micro-batch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from spmdzero.backend import current, nodes_behind
from spmdzero.errors import SpmdZeroUsageError, UsageAssertionError


def check_loss(loss: Any) -> None:
    """Checks that `loss` is a scalar that a forward of the engine made.

    Raises:
        UsageAssertionError: it is not such a scalar.
        ReplicaRegionError: it is computed with a tensor that a hook kept from inside the forward.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageAssertionError(
            f"engine.backward needs a scalar loss, got {shape}. Reduce it first: loss.mean()"
        )
    if loss.grad_fn is None and not runs_forwards(loss):
        raise UsageAssertionError(
            "engine.backward(loss) without a forward: this loss does not depend on what "
            "engine(...) returned. Call loss = engine(...) outside of torch.no_grad() and "
            "don't detach it"
        )
    current().refuse_leak(loss)


def runs_forwards(loss: torch.Tensor) -> bool:
    """Whether hooks of `loss` run the forwards whose gradients its backward is to bring.

    Gradient caching is of that form: the loss is a leaf, whose value a forward without gradients
    has given, and a hook on it runs each part of the batch again, with its own backward pass.
    """
    if loss.grad_fn is None:
        return _has_hooks(loss)
    # A client divides such a loss by the accumulation, adds parts up, hands it to the devices.
    behind = nodes_behind(loss, ends=lambda node: _kind(node) not in _PASSES_ON)
    return any(_has_hooks(leaf) for leaf in (getattr(n, "variable", None) for n in behind))


def _has_hooks(leaf: torch.Tensor | None) -> bool:
    return leaf is not None and leaf.requires_grad and bool(leaf._backward_hooks)


def find_loss(output: Any) -> torch.Tensor:
    """The loss in a module's output.

    Raises:
        SpmdZeroUsageError: the output has no loss.
    """
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor):
        raise SpmdZeroUsageError(
            f"train_batch found no loss in the module's output ({type(output).__name__}): return "
            "it first, or as .loss; or call engine(...), backward and step yourself"
        )
    return loss


def micro_batches(data: Any, count: int) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yields `count` micro-batches as the positional and keyword inputs of a forward.

    Raises:
        SpmdZeroUsageError: `data` is no iterator, or ends too early.
    """
    if not isinstance(data, Iterator):
        raise SpmdZeroUsageError(
            f"train_batch takes an iterator or one batch (a tensor, a tuple, a dict), got "
            f"{type(data).__name__}: make an iterator with iter(...) once, before the training loop"
        )
    for index in range(count):
        try:
            batch = next(data)
        except StopIteration:
            raise SpmdZeroUsageError(
                f"the data ended after {index} of {count} micro-batches of one step"
            ) from None
        yield inputs_of(batch)


def inputs_of(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A batch as the positional and keyword inputs of a forward."""
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


# Number of a node's output -> its batch dim.
Batches = Mapping[int, int]
# Content of a tensor: the batch dim if it has rows, the name of the node if it is a sum over them,
# or None for anything else, a mean for example.
_Content = int | str | None
# Nodes whose output is a sum over rows if their input is one.
_KEEPS = {
    "Add", "Alias", "Cat", "Clone", "Crossing", "Expand", "Mean", "Neg", "Reshape", "ReshapeAlias",
    "Select", "Squeeze", "Stack", "Sub", "Sum", "ToCopy", "UnsafeView", "Unsqueeze", "View",
    "_Deferring", "_Reading", "_ToHost", "_Undeferring",
}  # fmt: skip
# Nodes between a loss and the leaves that it is a sum of, each times a number; a leaf is one, too.
_PASSES_ON = {*_KEEPS, "Div", "Mul", "torch::autograd::AccumulateGrad"}


def summed_by(loss: torch.Tensor, batches_of: Callable[[Any], Batches | None]) -> str | None:
    """The name of the node that sums the rows of an engine's outputs into `loss`, or None.

    A sum that is multiplied or divided afterwards may be a mean, and counts as a mean.

    Args:
        loss: the loss with its graph.
        batches_of: returns the batches among the outputs of a node that made an engine's outputs;
            None for other nodes.
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
    """The content of a node's output, given the contents of its inputs."""
    if len(contents) != 1:
        return None
    (content,), kind = contents, _kind(node)
    if isinstance(content, str):
        return content if kind in _KEEPS else None
    reduction = getattr(node, "_saved_reduction", 0)
    if reduction:
        return node.name() if reduction == 2 else None
    if kind not in ("Mean", "Select", "Sum") or not _takes(node, content):
        return content
    return node.name() if kind == "Sum" else None


def _kind(node: Any) -> str:
    return node.name().partition("Backward")[0]


def _takes(node: Any, batch: int) -> bool:
    """Whether a node reduces or selects over the dim `batch`, perhaps among others."""
    dims = getattr(node, "_saved_dim", ())
    dims = (dims,) if isinstance(dims, int) else dims
    rank = len(node._saved_self_sym_sizes)
    # autograd keeps a negative number as the unsigned one of the same bits.
    return not dims or any((d - 2**64 if d >= 2**63 else d) % rank == batch for d in dims)
