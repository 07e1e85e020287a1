"""The processes of the job, one per host: whether there are others, and how they join."""

import datetime
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spmdzero._logging import leave_lines_to_the_first_host
from spmdzero.backend._current import current, runtime, why_alone
from spmdzero.backend._quiet import without_gloos_lines
from spmdzero.backend.hosts import _launched as _single_process
from spmdzero.backend.hosts._launched import (
    GLOO,
    TIMEOUT,
    call_roll_at,
    free_port,
    has_peers,
    join_launched,
    name_a_process_that_is_surely_alone,
)
from spmdzero.backend.hosts._meeting import meeting
from spmdzero.backend.hosts._watch import STATUS
from spmdzero.backend.hosts._watching import begin, note_joint, waiting, watch, watch_with
from spmdzero.errors import SpmdZeroRuntimeError, SpmdZeroUsageError

logger = logging.getLogger("spmdzero")
_Value = TypeVar("_Value")
__all__ = [
    "STATUS",
    "TIMEOUT",
    "broadcast",
    "connect",
    "free_port",
    "gather_objects",
    "gather_on_first",
    "is_alone",
    "join",
    "name_a_process_that_is_surely_alone",
    "name_newest",
    "new_group",
    "note_joint",
    "watch_with",
]


def join(
    *,
    required: bool | None = None,
    timeout: datetime.timedelta = TIMEOUT,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    named_port: int | None = 29500,
) -> None:
    """Creates the gloo group that moves host objects and CPU tensors, unless there is a group.

    Processes are found by `init_method`, by the launcher's environment, or by the device runtime.

    Args:
        required: False requires that there is a group already.
        timeout: of one collective.
        init_method: as in `torch.distributed.init_process_group`, with `rank` and `world_size`.
        named_port: the MASTER_PORT that a lone process finds in its environment, with a launcher's
            other variables; None leaves the environment alone.

    Raises:
        SpmdZeroRuntimeError: a device was used already, without SPMD or alone; or a process hasn't
            come within `timeout`.
        SpmdZeroUsageError: `required` is False, and there is no group.
    """
    if dist.is_initialized() and current().in_region():
        # In a forward the group's size is the number of devices.
        return
    if required is False and not dist.is_initialized():
        raise SpmdZeroUsageError(
            "dist_init_required=False, but torch.distributed is not initialised. Leave it out, or "
            "call spmdzero.init_distributed() first"
        )
    if init_method is not None and not dist.is_initialized():
        # This variable keeps the store until torch has its own store on the same server.
        store = call_roll_at(init_method, rank=rank, count=world_size, timeout=timeout)
        with without_gloos_lines(), meeting(timeout):
            dist.init_process_group(
                GLOO, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
            )
        del store
    join_launched(timeout)
    # Start the runtime only now: if it can't find the other devices by itself, it asks the group.
    runtime.start()
    if not dist.is_initialized():
        _make_group(timeout, named_port)
    begin()
    if dist.get_rank() > 0:
        leave_lines_to_the_first_host()


def _make_group(timeout: datetime.timedelta, named_port: int | None) -> None:
    """Creates the group of the processes that the device runtime found, or of this one alone."""
    alone = runtime.process_count() == 1
    with without_gloos_lines():
        if alone:
            # No port is opened for a process without peers.
            store = dist.HashStore()
            dist.init_process_group(GLOO, store=store, timeout=timeout, rank=0, world_size=1)
        else:
            dist.init_process_group(GLOO, init_method=runtime.rendezvous(), timeout=timeout)
    if alone and named_port is not None:
        _single_process.name_the_only_process(port=named_port)


def connect(*, required: bool | None) -> None:
    """Joins the processes; `required` as in `join`.

    A process without peers has a group too, as under DeepSpeed: scripts ask torch.distributed for
    their rank. Its environment stays as it is, unless `required`.

    Raises:
        SpmdZeroRuntimeError: the device runtime does not connect the processes that the launcher
            started: each would train a model of its own. Or as `join`.
        SpmdZeroUsageError: as `join`.
    """
    runtime.start()
    join(required=required, named_port=29500 if required else None)
    launched = dist.get_world_size()
    connected = runtime.process_count()
    if launched != connected:
        alone = why_alone(runtime.platform())
        if alone is not None:
            raise SpmdZeroRuntimeError(f"{launched} processes were started. {alone}")
        raise SpmdZeroRuntimeError(
            f"the launcher started {launched} processes, and the device runtime connects "
            f"{connected}: they would not train one model. Start one process per host, which "
            "drives all its devices; on one host without a launcher: python train.py"
        )


def name_newest(find: Callable[[], str | None]) -> None:
    """Sets `find`, which finds the checkpoint that is named when another host is gone."""
    watched = watch()
    if watched is not None:
        watched.newest = find


def is_alone() -> bool:
    """Whether this process has no peers, and none can join it."""
    joined = dist.is_initialized() or has_peers()
    return not joined and runtime.process_count() == 1


def gather_objects(value: _Value) -> list[_Value]:
    """The `value` of each process, by pickle, in the order of their ranks."""
    join()
    values = [value] * dist.get_world_size()
    note_joint("a comparison of all hosts")
    with waiting():
        dist.all_gather_object(values, value)
    return values


def gather_on_first(value: _Value) -> list[_Value] | None:
    """The `value` of each process in the order of ranks, on the first; None on the others."""
    join()
    first = dist.get_rank() == 0
    values: list[_Value] | None = [value] * dist.get_world_size() if first else None
    note_joint("a gather on the first host")
    with waiting():
        dist.gather_object(value, values)
    return values


def broadcast(tensor: torch.Tensor) -> None:
    """Overwrites a CPU tensor of every process with the first process's, in place."""
    join()
    note_joint("a broadcast")
    with waiting():
        dist.broadcast(tensor, src=0)


def new_group(ranks: list[int]) -> Any:
    """A group of some of the processes; every process calls this, member or not."""
    join()
    with without_gloos_lines():
        return dist.new_group(ranks)
