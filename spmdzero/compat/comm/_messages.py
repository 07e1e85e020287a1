"""Objects, messages from process to process, and barriers."""

import dataclasses
import datetime
from typing import Any

import torch
import torch.distributed as dist

from spmdzero.backend import runtime
from spmdzero.backend.hosts import processes
from spmdzero.compat.comm._log import labelled
from spmdzero.compat.comm._through_host import Done, all_on_cpu, on_host
from spmdzero.errors import SpmdZeroUsageError

Group = dist.ProcessGroup | None


@labelled()
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Sets `object_list[i]` to process i's `obj`, by pickle."""
    processes.join()
    dist.all_gather_object(object_list, obj, group)


@labelled()
def broadcast_object_list(
    object_list: list[Any], src: int, group: Group = None, device: Any = None
) -> None:
    """Copies the `object_list` of process `src` to every process, by pickle, in place."""
    processes.join()
    dist.broadcast_object_list(object_list, src, group)


@labelled()
def send(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Sends `tensor` to process `dst`."""
    isend(tensor, dst, group, tag).wait()


@labelled()
def isend(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> Any:
    """Starts to send `tensor` to process `dst`; returns the handle to wait on."""
    processes.join()
    host = tensor if all_on_cpu(tensor) else tensor.detach().cpu()
    work = dist.isend(host, dst, group, tag)
    # The handle keeps the copy alive until it has left.
    return _Sent(work, host)


@dataclasses.dataclass(frozen=True)
class _Sent:
    work: Any
    host: torch.Tensor

    def wait(self, timeout: Any = None) -> bool:
        return self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


@labelled()
def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Receives `tensor` from process `src` (None: any), in place; returns the sender's rank."""
    processes.join()
    with on_host(read=[], written=[tensor]) as (_, targets):
        return dist.recv(targets[0], src, group, tag)


@labelled()
def irecv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Any:
    """Starts to receive into `tensor`; returns the handle to wait on.

    A device tensor is received before this returns.
    """
    processes.join()
    if all_on_cpu(tensor):
        return dist.irecv(tensor, src, group, tag)
    recv(tensor, src, group, tag)
    return Done()


class P2POp:
    """One message for `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv` of this module.
        tensor: the tensor to send, or to receive into.
        peer: rank of the other process.
    """

    def __init__(
        self, op: Any, tensor: torch.Tensor, peer: int, group: Group = None, tag: int = 0
    ) -> None:
        if op not in (isend, irecv):
            raise SpmdZeroUsageError("P2POp takes spmdzero.comm.isend or spmdzero.comm.irecv")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


@labelled()
def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Any]:
    """Starts several messages, sends before receives; returns the handles in the given order."""
    started = {
        id(message): message.op(message.tensor, message.peer, message.group, message.tag)
        for message in sorted(p2p_op_list, key=lambda message: message.op is irecv)
    }
    return [started[id(message)] for message in p2p_op_list]


@labelled()
def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Waits until this host's devices are done and every process has called this."""
    processes.join()
    runtime.wait()
    return dist.barrier(group, async_op)


@labelled()
def monitored_barrier(
    group: Group = None, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Waits as `barrier` does, and names the processes that are missing after `timeout`."""
    processes.join()
    runtime.wait()
    dist.monitored_barrier(group, timeout, wait_all_ranks)


def has_reduce_scatter_tensor() -> bool:
    """True: there is `reduce_scatter_tensor`."""
    return True


def has_all_gather_into_tensor() -> bool:
    """True: there is `all_gather_into_tensor`."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: there is `all_reduce_coalesced`."""
    return True


def has_coalescing_manager() -> bool:
    """False: there is no coalescing manager."""
    return False
