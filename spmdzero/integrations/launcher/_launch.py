"""`spmdzero launch`: chooses the hosts, and runs a job on them."""

import dataclasses
import os
from collections.abc import Sequence

from spmdzero.backend._current import require_processes
from spmdzero.backend.chips._chips import has_tpu_chips
from spmdzero.backend.hosts.processes import free_port
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations.launcher._again import Commands, run_with_restarts
from spmdzero.integrations.launcher._commands import (
    Remote,
    Script,
    exported_variables,
    on_this_machine,
    over_ssh,
)
from spmdzero.integrations.launcher._hosts import filtered, read_hostfile
from spmdzero.integrations.launcher._job import Command

_PORT = 29500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The arguments of a command line of `spmdzero launch`.

    Attributes:
        script: the script and its arguments; ``-m`` before a module's name.
        hosts: number of processes of this machine that act as hosts; None to use `hostfile`.
        devices: number of virtual devices of the CPU for each of these processes.
        hostfile: a file of hosts that ssh reaches.
        include, exclude: the file's hosts and devices to use or leave out, as in DeepSpeed.
        address, port: address and port of the first process; by default the first host's name, and
            29500.
        remote: settings for ssh.
        restarts: largest number of restarts after failures.
        elastic: whether the job goes on without a host that is gone.
    """

    script: Sequence[str]
    hosts: int | None = None
    devices: int | None = None
    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    address: str = ""
    port: int | None = None
    remote: Remote = dataclasses.field(default_factory=Remote)
    restarts: int = 0
    elastic: bool = False


def launch(line: Line) -> int:
    """Runs a script in one process per host, until all have ended or one has failed for good.

    Returns 0, or the status of the host that caused the last failure.

    Raises:
        SpmdZeroUsageError: no hosts are named, or they are named in two ways; --elastic without
            --restarts; the backend can't connect hosts; or see `read_hostfile`, `filtered`,
            `run_with_restarts`.
    """
    if line.elastic and not line.restarts:
        raise SpmdZeroUsageError(
            "--elastic says on which hosts a job starts again: say how often, by --restarts N"
        )
    names, commands = _here(line) if line.hosts is not None else _elsewhere(line)
    if len(names) > 1:
        _require_backend(line)
    return run_with_restarts(
        commands,
        names,
        restarts=line.restarts,
        elastic=line.elastic,
        by_ssh=line.hosts is None,
    )


def _require_backend(line: Line) -> None:
    """Raises SpmdZeroUsageError if the backend can't connect the hosts."""
    if line.hosts is None:
        variables = exported_variables()
        # The platform of other hosts is not known here.
        platform = variables.get("PJRT_DEVICE", "")
    else:
        variables = dict(os.environ)
        here = "TPU" if has_tpu_chips() else "CPU"
        platform = "CPU" if line.devices else os.environ.get("PJRT_DEVICE") or here
    require_processes(variables, platform=platform)


def _script(line: Line, restart: int) -> Script:
    return Script(words=line.script, elastic=line.elastic, restart=restart)


def _here(line: Line) -> tuple[list[str], Commands]:
    if line.hostfile or line.include or line.exclude:
        raise SpmdZeroUsageError(
            "--hosts starts processes on this machine, --hostfile, --include and --exclude name "
            "machines: leave one of them out"
        )

    def commands(names: Sequence[str], restart: int) -> list[Command]:
        port = line.port or free_port()
        return on_this_machine(_script(line, restart), names, devices=line.devices, port=port)

    return [f"host {rank}" for rank in range(line.hosts or 1)], commands


def _elsewhere(line: Line) -> tuple[list[str], Commands]:
    if line.devices is not None:
        raise SpmdZeroUsageError(
            "--devices-per-host counts virtual devices of --hosts N; a hostfile says `slots=`"
        )
    pool = read_hostfile(line.hostfile or "/job/hostfile")
    if pool is None:
        raise SpmdZeroUsageError(
            f"--hostfile {line.hostfile}: there is no such file"
            if line.hostfile
            else "name the hosts: --hostfile FILE, or --hosts N for processes on this machine"
        )
    slots = filtered(pool, include=line.include, exclude=line.exclude)

    def commands(names: Sequence[str], restart: int) -> list[Command]:
        if line.address and names[0] != next(iter(slots)):
            raise SpmdZeroUsageError(
                f"--elastic: the first host is {names[0]} now, and --master_addr {line.address} "
                "that of the one that is gone. Leave --master_addr out: hosts are reached by the "
                "names in the hostfile then"
            )
        return over_ssh(
            _script(line, restart),
            {name: slots[name] for name in names},
            address=line.address or names[0],
            port=line.port or _PORT,
            remote=line.remote,
        )

    return list(slots), commands
