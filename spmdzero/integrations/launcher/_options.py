"""The launcher's command line: DeepSpeed's options, of which some are ignored or refused."""

import argparse
import logging
from collections.abc import Sequence

from spmdzero.compat.logging import LEVELS
from spmdzero.compat.refusals import why_refused
from spmdzero.errors import SpmdZeroUsageError

_NO_SSH = "no other host is reached from here"
_ONE_PROCESS = "one process drives all devices of a host, with all of its cores"
# Option -> why it has no effect.
_WITHOUT_MEANING = {
    "launcher": _NO_SSH,
    "launcher_args": _NO_SSH,
    "no_ssh_check": _NO_SSH,
    "ssh_port": _NO_SSH,
    "venv_script": "the script runs in this Python",
    "bind_cores_to_rank": _ONE_PROCESS,
    "bind_core_list": f"{_ONE_PROCESS}: start the line under `taskset -c LIST` to choose them",
}
# Option -> why it is refused, and what to do.
_REFUSED = {
    "autotuning": why_refused("autotuning"),
    "force_multi": "it starts a script on another host by ssh. Run the line on that host",
}
logger = logging.getLogger("spmdzero")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line of DeepSpeed's launcher (launcher/runner.py, `parse_args`).

    Raises:
        SystemExit: the line has an option that DeepSpeed doesn't have.
    """
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Runs a script in one process, which drives all devices of this host.",
    )
    add = parser.add_argument
    add("-H", "--hostfile", default="/job/hostfile", help="hosts, as in `worker-0 slots=4`")
    add("-i", "--include", default="", help="of the hosts and devices: NAME[:SLOT,...][@...]")
    add("-e", "--exclude", default="", help="all but these, in that form")
    add("--num_nodes", type=int, default=-1, help="the first so many hosts of the hostfile")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="virtual devices of a CPU")
    add("--master_port", type=int, default=29500, help="MASTER_PORT")
    add("--master_addr", default="", help="MASTER_ADDR")
    add("--node_rank", type=int, default=-1, help="this host's place, with --no_ssh")
    add("--no_ssh", action="store_true", help="each host runs this line by itself")
    add("--module", action="store_true", help="the script is a module's name")
    add("--no_python", action="store_true", help="the script is a program of its own")
    add("--no_local_rank", action="store_true", help="no --local_rank=0 for the script")
    add("--save_pid", action="store_true", help="write the process id to /tmp/PID.deepspeed")
    add("--enable_each_rank_log", default="None", help="a folder for what the process prints")
    add("--log_level", default="info", choices=list(LEVELS), help="of spmdzero's own lines")
    add("-q", "--quiet", action="store_true", help="--log_level error")
    nothing = parser.add_argument_group("without meaning, which is said, or refused")
    nothing.add_argument("--launcher", default=None)
    nothing.add_argument("--launcher_args", default=None)
    nothing.add_argument("--no_ssh_check", action="store_true")
    nothing.add_argument("--ssh_port", type=int, default=None)
    nothing.add_argument("--venv_script", default=None)
    nothing.add_argument("--bind_cores_to_rank", action="store_true")
    nothing.add_argument("--bind_core_list", default=None)
    nothing.add_argument("--force_multi", action="store_true")
    nothing.add_argument("--autotuning", default="", choices=["tune", "run"])
    add("user_script", help="the script")
    add("user_args", nargs=argparse.REMAINDER, help="the script's own")
    return parser.parse_args(args)


def judge(options: argparse.Namespace) -> None:
    """Logs which options of a line have no effect.

    Raises:
        SpmdZeroUsageError: an option can't be honoured.
    """
    for name, reason in _REFUSED.items():
        if getattr(options, name):
            raise SpmdZeroUsageError(f"--{name}: {reason}")
    if options.module and options.no_python:
        raise SpmdZeroUsageError("--module and --no_python: a module is run by Python. Leave one")
    for name, reason in _WITHOUT_MEANING.items():
        if getattr(options, name):
            logger.info("--%s has no meaning: %s", name, reason)
    if options.node_rank >= 0 and not options.no_ssh:
        logger.info("--node_rank has no meaning without --no_ssh")
