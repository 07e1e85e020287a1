"""The library that this process belongs to, and its rows of a global micro-batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.oracle.model import ROWS
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]

WORLD = 2


class Peer(NamedTuple):
    """One process's view of a library.

    Attributes:
        library: `deepspeed` or `spmdzero`.
        rank: of this process; None in spmdzero, where one process has all devices.
        rows: of a global micro-batch, what this process works on.
    """

    library: Any
    rank: int | None
    rows: slice


def this_process() -> Peer:
    """Real DeepSpeed, connected to its other ranks, when RANK is set, else spmdzero."""
    if "RANK" not in os.environ:
        import spmdzero

        return Peer(spmdzero, None, slice(None))
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    torch.set_num_threads(1)
    accelerator = get_accelerator()
    # Whether fp16 is fast, is what DeepSpeed asks the CPU; torch computes it on any.
    accelerator.is_fp16_supported = lambda: True
    # The all-reduce of inference, which no training calls, is compiled by two cores for a minute.
    build = accelerator.create_op_builder
    accelerator.create_op_builder = lambda name: (
        None if name == "ShareMemCommBuilder" else build(name)
    )
    deepspeed.init_distributed(dist_backend="gloo")
    rank, share = int(os.environ["RANK"]), ROWS // WORLD
    return Peer(deepspeed, rank, slice(rank * share, (rank + 1) * share))


def run_ours(*arguments: str) -> str:
    """What a Python with spmdzero on `WORLD` devices prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(WORLD), XLA_FLAGS=""),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
