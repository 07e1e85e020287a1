"""Values in the host's memory within a program: see `HostMemory` of the protocols.

Only programs for TPUs move them. Other programs are the same without the moves.
"""

import functools
from typing import Any

import jax
import torch

from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._operations import KEEP_ON_HOST, MeshOp
from spmdzero.backend.jax._tensor import over
from spmdzero.backend.jax._values import record
from spmdzero.backend.jax._versions import moved, moves_to_host


def missing() -> str:
    """Why the traced program moves nothing to the host's memory, ``""`` where it does."""
    if moves_to_host():
        return ""
    on_cpu = jax.default_backend() == "cpu"
    return "the memory of CPU devices is the host's" if on_cpu else "only TPU programs move it"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The value of `tensor` in host memory, for `from_host` only; autograd records nothing."""
    return _recorded(MeshOp((KEEP_ON_HOST,), functools.partial(moved, host=True)), tensor)


def from_host(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The value that `to_host` was given, copied to the devices once `after` is computed."""
    return _recorded(MeshOp(("fetch from the host",), _fetched), tensor, after)


def _recorded(op: MeshOp, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    values = tuple(map(value_of, (tensor, *others)))
    return over(record(op, values, {}, [(values[0].shape, values[0].dtype)])[0])


def _fetched(array: Any, after: Any) -> Any:
    # Without the barrier the compiler starts the copy early, and the device holds it all along.
    held, _ = jax.lax.optimization_barrier((array, after))
    return moved(held, host=False)
