"""Collectives of `torch.distributed` over hosts whose tensors are on the devices."""

from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from spmdzero.backend._current import arrays
from spmdzero.backend._ended_work import ended_work
from spmdzero.backend.forms._tree import found, mapped
from spmdzero.backend.hosts._watching import waiting

_c10d = torch.ops.c10d
# Messages of one host to another, objects and barriers have CPU tensors.
COLLECTIVES: tuple[Any, ...] = tuple(
    getattr(_c10d, name).default
    for name in (
        "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
        "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_",
        "scatter_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
        "alltoall_", "alltoall_base_", "gather_into_tensor_",
    )
    if hasattr(_c10d, name)
)  # fmt: skip
# One host's tensors are the result already.
_KEEPS = COLLECTIVES[:4]


def over_hosts(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a collective on copies in this host's memory, which gloo works on, and writes it back.

    It has ended when this returns.

    Args:
        func: one of `COLLECTIVES`.
    """
    groups = [ProcessGroup.unbox(a) for a in args if _is_group(a)]
    if func in _KEEPS and groups[0].size() == 1:
        return args[0], finished()
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        if not arrays.is_mine(tensor):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor, arrays.read(tensor)
        return copies[id(tensor)][1]

    given = mapped(args, torch.Tensor, on_host)
    with waiting():
        _, work = func(*given, **kwargs)
        Work.unbox(work).wait()
    with torch.no_grad():
        # The schemas don't say so, but all of them write their first argument alone.
        for tensor in found(args[0], torch.Tensor):
            if id(tensor) in copies:
                tensor.copy_(copies[id(tensor)][1])
    return args[0], work


def finished() -> Any:
    """Makes what torch's dispatcher returns for a collective that has ended."""
    return ended_work().boxed()


def _is_group(value: Any) -> bool:
    if not isinstance(value, torch.ScriptObject):
        return False
    kind: Any = value._type()
    return kind.name() == "ProcessGroup"
