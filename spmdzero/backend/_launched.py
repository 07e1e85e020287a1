"""Processes that a launcher started: the group that its variables describe."""

import datetime
import os
import socket

import torch.distributed as dist

from spmdzero.backend._meeting import meeting
from spmdzero.backend._quiet import without_gloos_line
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
        timeout: of one collective.

    Returns whether there are other processes.
    """
    if not dist.is_initialized():
        if not has_peers():
            return False
        with without_gloos_line(), meeting(timeout):
            dist.init_process_group(GLOO, timeout=timeout)
    return dist.get_world_size() > 1


def own_host() -> str:
    """In the first process, how the others reach its host."""
    # By definition the launcher's variable names the host of the first process.
    return os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
