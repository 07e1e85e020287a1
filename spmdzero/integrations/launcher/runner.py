"""`deepspeed train.py ...`: runs the script in one process that drives all of a host's devices."""

import argparse
import atexit
import io
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spmdzero.backend import runtime
from spmdzero.compat.logging import set_log_level_from_string
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations import install
from spmdzero.integrations._as_main import run_as_main
from spmdzero.integrations.launcher._commands import ENVIRONMENT_FILE, variables_of
from spmdzero.integrations.launcher._hosts import Place, place_of
from spmdzero.integrations.launcher._options import judge, parse_args

# accelerate imports it under DeepSpeed's name.
DEEPSPEED_ENVIRONMENT_NAME = ENVIRONMENT_FILE
logger = logging.getLogger("spmdzero")


def main(args: Sequence[str] | None = None) -> None:
    """The command `deepspeed`: becomes the process that DeepSpeed's launcher would start.

    Args:
        args: the command line, `sys.argv[1:]` by default.

    Raises:
        SystemExit: with the script's own code; 2 for a line that can't be honoured.
    """
    options = parse_args(args)
    try:
        set_log_level_from_string("error" if options.quiet else options.log_level)
        judge(options)
        place = place_of(options, virtual_devices=_virtual_devices())
        # The question for the runtime's platform connects the hosts.
        named = variables_of(
            place.rank, hosts=place.hosts, address=place.address, port=options.master_port
        )
        os.environ.update(named)
        _use_devices(place)
        if options.save_pid:
            _save_pid()
        if options.enable_each_rank_log != "None":
            _print_into(Path(options.enable_each_rank_log), place.rank)
        _become(options)
    except SpmdZeroUsageError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(2)


def _virtual_devices() -> int:
    return int(os.environ.get("CPU_NUM_DEVICES", "1"))


def _use_devices(place: Place) -> None:
    """Sets the number of a CPU's virtual devices; a TPU host's process has all its chips."""
    if place.devices is None:
        return
    # A CPU's runtime reads the variable at the first question about devices.
    os.environ["CPU_NUM_DEVICES"] = str(place.devices)
    if runtime.platform() == "CPU":
        return
    del os.environ["CPU_NUM_DEVICES"]
    if place.chosen:
        raise SpmdZeroUsageError(
            "--include and --exclude can't choose among the chips of a host: one process drives "
            "them all. Leave the slots out"
        )
    logger.warning(
        "%d devices are asked for; one process drives all chips of this host", place.devices
    )


def _save_pid() -> None:
    """Writes DeepSpeed's file for tools that end a run; launcher and script are one process."""
    print(f"launcher pid: {os.getpid()}")
    file = Path("/tmp", f"{os.getpid()}.deepspeed")
    try:
        # Anyone can put a link there that leads to another user's file.
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise SpmdZeroUsageError(
            f"--save_pid: {file} can't be written ({error.strerror}): remove it, or leave the "
            "option out"
        ) from error
    with os.fdopen(handle, "w") as opened:
        opened.write(str(os.getpid()))
    atexit.register(file.unlink, missing_ok=True)


def _print_into(folder: Path, rank: int) -> None:
    if folder.is_file():
        raise SpmdZeroUsageError(f"--enable_each_rank_log {folder}: is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log", "w") as log:
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log.fileno(), descriptor)


def _become(options: argparse.Namespace) -> None:
    own = [] if options.no_local_rank else ["--local_rank=0"]
    arguments = [*own, *options.user_args]
    install()
    if options.no_python:
        program = shutil.which(options.user_script)
        if program is None:
            raise SpmdZeroUsageError(f"--no_python {options.user_script}: no such program")
        sys.stdout.flush()
        os.execv(program, [options.user_script, *arguments])
    # DeepSpeed starts the script by `python -u`, which writes each line at once.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    run_as_main(options.user_script, arguments, module=options.module)


if __name__ == "__main__":
    main()
