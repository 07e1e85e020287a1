"""A process that has nobody to talk to: it needs no launcher, no port, no line about peers."""

import contextlib
import os
import sys
from collections.abc import Iterator

from spmdzero.backend._launched import is_launched

_GLOO = b"[Gloo] Rank 0 is connected to 0 peer ranks"


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


@contextlib.contextmanager
def without_gloos_line() -> Iterator[None]:
    """Leaves out the line that gloo prints for each group, of no peers; all else is printed.

    It comes from C++, below `sys.stdout`, and no level of logging turns it off.
    """
    with contextlib.suppress(AttributeError, ValueError):
        # It is None without a console, and some programs close it.
        sys.stdout.flush()
    try:
        before = os.dup(1)
    except OSError:
        # Nothing that is printed is seen.
        yield
        return
    with os.fdopen(os.memfd_create("printed"), "w+b") as printed:
        os.dup2(printed.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(before, 1)
            os.close(before)
            printed.seek(0)
            for line in printed:
                if not line.startswith(_GLOO):
                    os.write(1, line)
