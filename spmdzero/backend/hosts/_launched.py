"""Processes that a launcher started: the group that its variables describe."""

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


def _timeout() -> datetime.timedelta:
    """What DeepSpeed's variable says; raises UsageValueError."""
    given = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    if not given.strip().isdecimal() or int(given) == 0:
        raise UsageValueError(
            f"DEEPSPEED_TIMEOUT={given!r}: how long the processes wait for each other, a whole "
            "number of minutes of at least 1, such as 10, which it is where it isn't set"
        )
    return datetime.timedelta(minutes=int(given))


TIMEOUT = _timeout()


def is_launched() -> bool:
    """Whether a launcher's environment places this process, alone or among others."""
    return all(name in os.environ for name in _VARIABLES)


def has_peers() -> bool:
    """Whether a launcher's environment names other processes."""
    return is_launched() and os.environ["WORLD_SIZE"] != "1"


def join_launched(timeout: datetime.timedelta = TIMEOUT) -> bool:
    """Makes the gloo group of a launcher's processes, unless there is one.

    Args:
        timeout: of one collective, and for all of them to come.

    Returns whether there are other processes.

    Raises:
        SpmdZeroRuntimeError: some haven't come.
    """
    if not dist.is_initialized():
        if not has_peers():
            return False
        # It holds the store until torch's own stands on the same server.
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
    """Waits until all have come to an address ``tcp://host:port``; see `call_roll`.

    Returns the store, which is to be kept until torch has made its own there; None for another
    `init_method`, by which torch itself waits.
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
    """In the first process, how the others reach its host."""
    # By definition the launcher's variable names the host of the first process.
    return os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def name_the_only_process(*, port: int) -> None:
    """Sets what scripts read of a launcher's environment (DeepSpeed, comm/comm.py, mpi_discovery).

    Leaves that of a launcher of one process alone, as DeepSpeed does: its port is in use.

    Args:
        port: nothing listens there, as long as nobody connects to this process.
    """
    if is_launched() and "LOCAL_RANK" in os.environ:
        return
    only = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in only.items()})
    os.environ["MASTER_PORT"] = str(port)
