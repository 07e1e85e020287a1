"""How an input of a module enters: as a batch, whose rows are split, or whole."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A tensor that every replica receives whole, although its dim 0 could pass for a batch."""

    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    """A global tensor whose dim `dim` is the batch, of all devices together."""

    tensor: torch.Tensor
    dim: int


def replicated(tensor: torch.Tensor) -> Replicated:
    """Declares that every replica receives `tensor` whole.

    An input whose dim 0 has as many rows as the micro-batch enters the replica region as a
    batch shard. `engine(x, spmdzero.replicated(table))` says that `table` only looks like one.
    """
    return Replicated(tensor)
