"""A process that has nobody to talk to: it needs no launcher, no port, no line about peers."""

import os

from spmdzero.backend.hosts._launched import is_launched


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
