"""Child processes of a test."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what running tests left in it, and `more`.

    A child that inherits these has SPMD on from the start, and dumps optimised programs only.
    """
    left = ("XLA_USE_SPMD", "XLA_DUMP_POST_OPTIMIZATIONS")
    return {name: value for name, value in os.environ.items() if name not in left} | more


def run_module(module: str, *arguments: str, devices: int, **variables: str) -> str:
    """What `python -m module` prints on that many virtual devices; it has to succeed."""
    return run_python("-W", "error", "-m", module, *arguments, devices=devices, **variables)


def run_python(*arguments: str, devices: int, timeout: int = 1200, **variables: str) -> str:
    """What `python` with these arguments prints within `timeout` seconds, as `run_module`."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices), **variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
