"""What ranks on this machine are told, and what of DeepSpeed's outlives a run.

The tests that compare with real DeepSpeed start its ranks with this too.
"""

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_KERNELS = Path(sys.prefix) / "deepspeed_kernels"


@contextlib.contextmanager
def rank_environments(
    count: int, *, threads: int, kept: Path = _KERNELS
) -> Iterator[list[dict[str, str]]]:
    """The variables of each of `count` ranks, for one run: to be left when the ranks have ended.

    DeepSpeed compiles its CPU kernels at its first run, which takes a minute. torch has other
    processes wait for that as long as a file exists, and a killed process leaves it behind: all who
    come after it would wait forever. So each run has a copy of its own, and what it compiled is
    added to `kept`, which is this Python's: another environment's DeepSpeed would compile anew.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as scratch:
        kernels = Path(scratch) / "kernels"
        shutil.copytree(kept, kernels) if kept.exists() else kernels.mkdir()
        shared = {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": str(threads),
            "WORLD_SIZE": str(count),
            "LOCAL_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCH_EXTENSIONS_DIR": str(kernels),
            # `ninja`, which compiles them, stands beside this Python.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        try:
            yield [shared | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]
        finally:
            # DeepSpeed leaves one of 69 MB for each rank.
            for left in _SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                left.unlink()
            _keep(kernels, kept)


def _keep(kernels: Path, kept: Path) -> None:
    """Adds to `kept` what is compiled to its end and new there."""
    for compiled in kernels.glob("*/*.so"):
        built = compiled.parent
        if (built / "lock").exists() or (kept / built.name).exists():
            continue
        kept.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            copy = shutil.copytree(built, Path(scratch) / built.name)
            # Whole, or not at all where another run has added it meanwhile.
            with contextlib.suppress(OSError):
                copy.rename(kept / built.name)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
