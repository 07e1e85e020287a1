"""What rests in the host's memory within a program: see `HostMemory` of the protocols.

A CPU's program is the same without the moves.
"""

import functools
from typing import Any

import jax
import torch

from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._operations import KEEP_ON_HOST, MeshOp
from spmdzero.backend.jax._tensor import over
from spmdzero.backend.jax._values import record
from spmdzero.backend.jax._versions import has_host_memory, moved


def missing() -> str:
    """Why the program that is being traced has none to itself, ``""`` where it has."""
    return "" if has_host_memory() else "the memory of CPU devices is the host's"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, resting in the host's memory; only `from_host` may read it."""
    return _recorded(MeshOp((KEEP_ON_HOST,), functools.partial(moved, host=True)), tensor)


def from_host(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """What `to_host` was given, on the devices, fetched once `after` is known."""
    return _recorded(MeshOp(("fetch from the host",), _fetched), tensor, after)


def _recorded(op: MeshOp, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    values = tuple(map(value_of, (tensor, *others)))
    return over(record(op, values, {}, [(values[0].shape, values[0].dtype)])[0])


def _fetched(array: Any, after: Any) -> Any:
    # The compiler would fetch it at once, to have the copy done early.
    held, _ = jax.lax.optimization_barrier((array, after))
    return moved(held, host=False)
