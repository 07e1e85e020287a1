"""Commands that start a job's processes, here or by ssh on other hosts as DeepSpeed does."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdzero import _torch_tpu
from spmdzero.backend.hosts._roll_call import HOSTS
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations.launcher._job import Command

# accelerate writes variables for hosts that ssh reaches into a file of this name.
ENVIRONMENT_FILE = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
# Prefixes of the variables that go to other hosts: DeepSpeed's (launcher/runner.py), and those of
# spmdzero's runtimes.
_EXPORTED = (
    "MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "SPMDZERO", "DEEPSPEED", "JAX", "XLA", "PJRT", "TPU",
    "LIBTPU", "CPU_NUM_DEVICES", _torch_tpu.SWITCH,
)  # fmt: skip
_NODE = ("-u", "-m", "spmdzero.integrations.launcher.node")
ELASTIC = "--elastic"
"""Argument that tells a node that its launcher may start fewer hosts after a failure."""
RESTART = "SPMDZERO_RESTART"
"""Variable of each process: the number of earlier starts of the job, 0 the first time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """The script that each host runs.

    Attributes:
        words: the script and its arguments; ``-m`` before a module's name.
        elastic: whether fewer hosts may be started after a failure.
        restart: number of earlier starts of the job.
    """

    words: Sequence[str]
    elastic: bool = False
    restart: int = 0

    def command(self) -> list[str]:
        """The command line that runs the script."""
        return [sys.executable, *_NODE, *([ELASTIC] if self.elastic else []), *self.words]

    def variables(self) -> dict[str, str]:
        """The variables of the script's environment, without those for its rank."""
        return {RESTART: str(self.restart)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remote:
    """Settings for reaching other hosts.

    Attributes:
        port: port of ssh; None for ssh's default.
        options: more arguments for ssh.
    """

    port: int | None = None
    options: str = ""


def variables_of(rank: int, *, hosts: int, address: str, port: int) -> dict[str, str]:
    """A launcher's variables that scripts read (DeepSpeed, launcher/launch.py), for one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(hosts),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "CROSS_RANK": str(rank),
        "CROSS_SIZE": str(hosts),
        "LOCAL_SIZE": "1",
    }


def on_this_machine(
    script: Script, names: Sequence[str], *, devices: int | None, port: int
) -> list[Command]:
    """Commands for local processes that act as hosts, each with `devices` virtual CPU devices."""
    virtual = {} if devices is None else {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    return [
        Command(
            name=name,
            words=script.command(),
            variables={
                **os.environ,
                **variables_of(rank, hosts=len(names), address="127.0.0.1", port=port),
                **script.variables(),
                **virtual,
            },
        )
        for rank, name in enumerate(names)
    ]


def over_ssh(
    script: Script,
    slots: Mapping[str, Sequence[int]],
    *,
    address: str,
    port: int,
    remote: Remote,
) -> list[Command]:
    """Commands for one process on each host, in this folder and with this Python, as in DeepSpeed.

    Args:
        script: the script that the processes run.
        slots: host -> its devices; a CPU gets as many virtual devices.
        address, port: address and port of the first process.
        remote: settings for ssh.
    """
    ssh = ["ssh", "-o", "PasswordAuthentication=no", *shlex.split(remote.options)]
    if remote.port is not None:
        ssh += ["-p", str(remote.port)]
    exported = exported_variables()
    commands = []
    for rank, (host, devices) in enumerate(slots.items()):
        variables = exported | variables_of(rank, hosts=len(slots), address=address, port=port)
        variables |= script.variables()
        variables |= {"CPU_NUM_DEVICES": str(len(devices)), HOSTS: ",".join(slots)}
        exports = "".join(f"export {key}={shlex.quote(text)}; " for key, text in variables.items())
        line = f"{exports}cd {shlex.quote(os.getcwd())}; exec {shlex.join(script.command())}"
        commands.append(
            Command(name=host, words=[*ssh, "--", host, line], variables=dict(os.environ))
        )
    return commands


def exported_variables() -> dict[str, str]:
    """The variables for other hosts, from this environment and from files ``.deepspeed_env``.

    Raises:
        SpmdZeroUsageError: a line of a file is not ``NAME=VALUE``.
    """
    found = {key: text for key, text in os.environ.items() if key.startswith(_EXPORTED)}
    for folder in dict.fromkeys((Path.home(), Path.cwd())):
        file = folder / ENVIRONMENT_FILE
        if not file.is_file():
            continue
        for line in filter(None, (line.strip() for line in file.read_text().splitlines())):
            name, equals, text = line.partition("=")
            if not equals or not name.isidentifier():
                raise SpmdZeroUsageError(f"{file}: {line!r}: write NAME=VALUE")
            found[name] = text
    return found
