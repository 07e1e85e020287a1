"""Processes that a launcher started, and the group that its environment variables describe."""

import datetime
import os
import socket
import urllib.parse
from typing import Any

import torch.distributed as dist

from spmdzero.backend._quiet import without_gloos_lines
from spmdzero.backend.hosts._meeting import meeting
from spmdzero.backend.hosts._roll_call import call_roll, tcp_store
from spmdzero.errors import UsageValueError

GLOO = "gloo"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of variables by which JAX or a script finds others: Slurm, Open MPI, MPICH, several slices.
_OF_CLUSTERS = ("SLURM_", "OMPI_", "PMI_", "JAX_COORDINATOR_", "MEGASCALE_")


def _timeout() -> datetime.timedelta:
    """The time limit that DEEPSPEED_TIMEOUT sets; raises UsageValueError."""
    given = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    if not given.strip().isdecimal() or int(given) == 0:
        raise UsageValueError(
            f"DEEPSPEED_TIMEOUT={given!r}: how long the processes wait for each other, a whole "
            "number of minutes of at least 1, such as 10, which it is where it isn't set"
        )
    return datetime.timedelta(minutes=int(given))


TIMEOUT = _timeout()


def is_launched() -> bool:
    """Whether a launcher started this process, alone or among others."""
    return all(name in os.environ for name in _VARIABLES)


def has_peers() -> bool:
    """Whether a launcher started other processes beside this one."""
    return is_launched() and os.environ["WORLD_SIZE"] != "1"


def join_launched(timeout: datetime.timedelta = TIMEOUT) -> bool:
    """Creates the gloo group of a launcher's processes, unless there is a group.

    Args:
        timeout: of the roll call, and of each collective of the group.

    Returns whether there are other processes.

    Raises:
        SpmdZeroRuntimeError: some processes haven't come.
    """
    if not dist.is_initialized():
        if not has_peers():
            return False
        # This variable keeps the store until torch has its own store on the same server.
        store = _roll_call(timeout)
        with without_gloos_lines(), meeting(timeout):
            dist.init_process_group(GLOO, timeout=timeout)
        del store
    return dist.get_world_size() > 1


def _roll_call(timeout: datetime.timedelta) -> Any:
    there = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return call_roll_at(f"tcp://{there}", rank=rank, count=count, timeout=timeout)


def call_roll_at(init_method: str, *, rank: int, count: int, timeout: datetime.timedelta) -> Any:
    """Waits until all processes have come to ``tcp://host:port``; see `call_roll`.

    Returns the store, which must live until torch has made its own there; None for another
    `init_method`, with which torch itself waits.
    """
    parts = urllib.parse.urlsplit(init_method)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or rank < 0 or count < 2:
        return None
    address, port = parts.hostname, parts.port
    return call_roll(
        lambda: tcp_store(address, port, rank=rank, timeout=timeout),
        rank=rank,
        count=count,
        where=f"at {address}:{port}",
        timeout=timeout,
    )


def own_host() -> str:
    """The address by which the others reach the first process's host; called in that process."""
    # The launcher's variable names the host of the first process by definition.
    return os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def name_the_only_process(*, port: int) -> None:
    """Sets the variables of a launcher for a lone process.

    Scripts read them; DeepSpeed sets them, too (comm/comm.py, mpi_discovery). Does nothing in a
    launcher's only process, whose port is in use.

    Args:
        port: MASTER_PORT, on which nothing listens unless another process connects to this one.
    """
    if is_launched() and "LOCAL_RANK" in os.environ:
        return
    only = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in only.items()})
    os.environ["MASTER_PORT"] = str(port)


def name_a_process_that_is_surely_alone() -> None:
    """Does what `name_the_only_process` does, with a free port, where no other host can be.

    Clients read the variables before the devices start, which would find the other hosts. So this
    is for devices that PJRT_DEVICE pretends on the CPU, and for a TPU host whose variables say that
    it has no others; never beside a variable of a launcher, or of a cluster that JAX detects.
    """
    told = os.environ
    if any(name in told for name in (*_VARIABLES, "LOCAL_RANK")):
        return
    if any(name.startswith(_OF_CLUSTERS) for name in told):
        return
    hosts = told.get("TPU_WORKER_HOSTNAMES", "")
    if told.get("PJRT_DEVICE") == "CPU" or (hosts and "," not in hosts):
        name_the_only_process(port=free_port())
