"""Child processes of a test."""

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

from tests.support.warm import run_warm

ROOT = Path(__file__).parents[2]
# By torch_xla, by `init_distributed` in a lone process, and by pytest: its variable is another one
# in each test, and would make each test start a process of its own to fork from, of half a GiB.
_LEFT = (
    "XLA_USE_SPMD", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "PYTEST_CURRENT_TEST",
)  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what a run of tests left in it, and `more`.

    A child that inherits it has SPMD on from the start, and a place among processes.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT}
    return kept | local_rank() | more


def local_rank() -> dict[str, str]:
    """A launcher's variables where `make test-local-rank` asks for them: a device is cpu:0 then."""
    rank = os.environ.get("TEST_LOCAL_RANK")
    if rank is None:
        return {}
    # Port 0 is any that is free.
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1"}
    return {"LOCAL_RANK": rank, "RANK": rank} | place


def free_port() -> str:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def fork() -> int:
    """`os.fork` for a child that leaves the devices alone; JAX warns that another may hang."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        return os.fork()


def run_module(module: str, *arguments: str, devices: int, **variables: str) -> str:
    """What `python -m module` prints on that many virtual devices; it has to succeed."""
    return run_python("-W", "error", "-m", module, *arguments, devices=devices, **variables)


def run_python(
    *arguments: str, devices: int = 1, timeout: int = 1200, fresh: bool = False, **variables: str
) -> str:
    """What `python` with these arguments prints within `timeout` seconds, as `run_module`.

    Args:
        fresh: nothing may be imported yet; so it is where variables are given, which imports read.
    """
    told = environment(**{"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)} | variables)
    if fresh or variables:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=told,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    else:
        done = run_warm(*arguments, cwd=ROOT, environment=told, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
