"""The library that this process belongs to, and its rows of a global micro-batch."""

import os
from typing import Any, NamedTuple

import torch

from tests.oracle.model import ROWS

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
    # Whether fp16 is fast, is what DeepSpeed asks the CPU; torch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    rank, share = int(os.environ["RANK"]), ROWS // WORLD
    return Peer(deepspeed, rank, slice(rank * share, (rank + 1) * share))
