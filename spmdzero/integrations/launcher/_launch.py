"""`spmdzero launch`: which hosts, and the job that runs on them."""

from collections.abc import Sequence

from spmdzero.backend.processes import free_port
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations.launcher._commands import (
    Remote,
    on_this_machine,
    over_ssh,
)
from spmdzero.integrations.launcher._hosts import filtered, read_hostfile
from spmdzero.integrations.launcher._job import run_together

_PORT = 29500


def launch(
    script: Sequence[str],
    *,
    hosts: int | None,
    devices: int | None,
    hostfile: str,
    include: str,
    exclude: str,
    address: str,
    port: int | None,
    ssh_port: int | None,
    ssh_options: str,
) -> int:
    """Runs a script in one process for each host, until all have ended or one has failed.

    Args:
        script: and its arguments; ``-m`` before a module's name.
        hosts: how many processes of this machine stand for hosts; None for those of `hostfile`.
        devices: virtual devices of the CPU for each of those.
        hostfile: a file of hosts that ssh reaches.
        include, exclude: which of its hosts and devices, as DeepSpeed writes it.
        address, port: of the first process; by default the first host's name, and 29500.
        ssh_port, ssh_options: of ssh.

    Returns 0, or the status of the first that failed.

    Raises:
        SpmdZeroUsageError: no hosts are named, or in two ways; or see `read_hostfile`, `filtered`.
    """
    if hosts is not None and (hostfile or include or exclude):
        raise SpmdZeroUsageError(
            "--hosts starts processes on this machine, --hostfile, --include and --exclude name "
            "machines: leave one of them out"
        )
    if hosts is not None:
        if port is None:
            port = free_port()
        return run_together(on_this_machine(script, hosts=hosts, devices=devices, port=port))
    if devices is not None:
        raise SpmdZeroUsageError(
            "--devices-per-host counts virtual devices of --hosts N; a hostfile says `slots=`"
        )
    pool = read_hostfile(hostfile or "/job/hostfile")
    if pool is None:
        raise SpmdZeroUsageError(
            f"--hostfile {hostfile}: there is no such file"
            if hostfile
            else "name the hosts: --hostfile FILE, or --hosts N for processes on this machine"
        )
    slots = filtered(pool, include=include, exclude=exclude)
    return run_together(
        over_ssh(
            script,
            slots,
            address=address or next(iter(slots)),
            port=port or _PORT,
            remote=Remote(port=ssh_port, options=ssh_options),
        )
    )
