"""The inputs and the loss of a micro-batch, found and checked."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spmdzero.backend import current
from spmdzero.errors import SpmdZeroUsageError, UsageAssertionError


def check_loss(loss: Any) -> None:
    """Looks whether `loss` is a scalar that a forward of the engine made.

    Raises:
        UsageAssertionError: it isn't.
        ReplicaRegionError: it is computed with what a hook kept from inside the forward.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageAssertionError(
            f"engine.backward needs a scalar loss, got {shape}. Reduce it first: loss.mean()"
        )
    if loss.grad_fn is None:
        raise UsageAssertionError(
            "engine.backward(loss) without a forward: this loss does not depend on what "
            "engine(...) returned. Call loss = engine(...) outside of torch.no_grad() and "
            "don't detach it"
        )
    current().refuse_leak(loss)


def find_loss(output: Any) -> torch.Tensor:
    """The loss in what a module returned.

    Raises:
        SpmdZeroUsageError: there is none.
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
    """`count` micro-batches of one step, each as the positional and keyword inputs of a forward.

    Raises:
        SpmdZeroUsageError: `data` is no iterator, or ends before.
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
