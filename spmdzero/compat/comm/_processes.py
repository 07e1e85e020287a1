"""The processes of the job, under DeepSpeed's names: one per host, which drives its devices."""

import datetime
import logging
import os
from typing import Any

import torch.distributed as dist

from spmdzero.backend import runtime
from spmdzero.backend.hosts import processes

logger = logging.getLogger("spmdzero")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta = processes.TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Switches SPMD on and connects the processes, one per host; DeepSpeed's signature.

    The device runtime, torch_xla's or JAX's, connects the devices of all hosts; this function makes
    the gloo group that moves host objects and CPU tensors between processes. Processes are found by
    the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), by `init_method`, or by
    the device runtime (`jax.distributed.initialize`). An existing group is used.

    A single process that no launcher started gets a group of its own, and in its environment the
    launcher's variables that scripts read: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Args:
        dist_backend: ignored: gloo is always used, as device tensors don't travel by it.
        auto_mpi_discovery: whether these variables are set.
        distributed_port: value for MASTER_PORT.
        verbose, config: have no effect.
        timeout: time limit of one collective.
        init_method: as in `torch.distributed.init_process_group`, with `rank` and `world_size`.
        dist_init_required: False requires that the processes were connected before.

    Raises:
        SpmdZeroRuntimeError: a device was used already, without SPMD or without the other hosts.
        SpmdZeroUsageError: `dist_init_required=False`, and the processes were not connected before.
    """
    if dist_backend not in (None, "gloo") and not dist.is_initialized():
        logger.info(
            "init_distributed(dist_backend=%r): gloo takes its place for what hosts tell each "
            "other, and the compiled step moves what is on the devices",
            dist_backend,
        )
    processes.join(
        required=dist_init_required,
        timeout=timeout,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        named_port=distributed_port if auto_mpi_discovery else None,
    )


def is_initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_initialized()


def is_available() -> bool:
    """True: nothing has to be built for collectives."""
    return True


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """The rank of this process among the processes (hosts) of `group`, -1 outside of it.

    One process drives all devices of its host, so this is not the rank of a device.
    """
    return dist.get_rank(group) if _joined(group) else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of processes (hosts) in `group`, -1 outside of it.

    The number of devices is `engine.dp_world_size`, or `get_accelerator().device_count()` on this
    host.
    """
    return dist.get_world_size(group) if _joined(group) else 1


def _joined(group: dist.ProcessGroup | None) -> bool:
    """Whether there is a process group; makes one unless this process is alone."""
    runtime.start()
    if group is None and processes.is_alone():
        return False
    processes.join()
    return True


def get_local_rank() -> int:
    """The rank of this process on its host, by the launcher's LOCAL_RANK; 0 for the only one."""
    return get_local_rank_from_launcher()


def get_local_rank_from_launcher() -> int:
    """LOCAL_RANK, or Open MPI's name for it, or 0."""
    return _from_environment("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", default=0)


def get_world_rank_from_launcher() -> int:
    """RANK, or Open MPI's name for it, or 0."""
    return _from_environment("RANK", "OMPI_COMM_WORLD_RANK", default=0)


def get_world_size_from_launcher() -> int:
    """WORLD_SIZE, or Open MPI's name for it, or 1."""
    return _from_environment("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)


def _from_environment(*names: str, default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


def get_world_group() -> dist.ProcessGroup:
    """The group of all processes."""
    processes.join()
    group = dist.group.WORLD
    assert group is not None
    return group


def new_group(ranks: list[int]) -> Any:
    """A group of some processes; every process calls it, members or not."""
    return processes.new_group(ranks)


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The rank among all processes of the process with `group_rank` in `group`."""
    return dist.get_global_rank(group or get_world_group(), group_rank)


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks among all processes of the members of `group`."""
    return dist.get_process_group_ranks(group or get_world_group())


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Ends `group`, or all groups. Devices stay connected."""
    dist.destroy_process_group(group)
