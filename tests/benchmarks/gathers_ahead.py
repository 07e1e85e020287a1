"""How early stage 3 gathers a parameter, and how many it keeps: time and memory on a TPU.

    SPMDZERO_BACKEND=jax CPU_NUM_DEVICES=8 python tests/benchmarks/gathers_ahead.py

Each row is a program that libtpu compiles with other constants of `replica/_gathered.py`: blocks of
two matrices and a tied table, in bf16. The table is one of docs/design.md.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend.replica import _gathered
from spmdzero.explain import Topology

# (uses ahead, parameters kept); the second row has the constants as they are.
ROWS = ((0, 3), (1, 3), (2, 3), (1, 1), (1, 6))


class Blocks(nn.Module):
    """`[rows, length]` words to the loss of the next word."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The loss, 0-dim."""
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, words.roll(-1, 1).flatten())


def row(ahead: int, live: int, told: argparse.Namespace) -> str:
    """One line of the table, of a program that is compiled here."""
    _gathered._AHEAD, _gathered._LIVE = ahead, live
    tpu, width = told.tpu, told.width
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 5 * width},
        "spmd": {"xla_flags": told.flags},
    }
    with torch.device("meta"):
        model = Blocks(told.blocks, width)
        words = torch.empty(Topology.parse(tpu).devices, told.tokens, dtype=torch.long)
    found = spmdzero.explain(model, config, words, tpu=[tpu], stages=())
    (compiled,) = found.fit_at(3).compiled
    time, memory = found.time_on(tpu), compiled.memory
    assert memory.arguments is not None
    beside = (memory.peak - memory.arguments) / 2**20
    step = math.fsum(share.seconds for share in time.kinds)
    numbers = f"{1e3 * step:.2f} | {1e3 * time.exposed:.2f} of {1e3 * time.wire:.2f} | {beside:.0f}"
    return f"| {ahead} | {live} | {numbers} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tpu", default="v5e:2x4")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--flags", default="none", help="as spmd.xla_flags")
    parser.add_argument("--rows", type=int, default=len(ROWS))
    told = parser.parse_args()
    print(
        "| uses ahead | kept | step, ms | of the wire the chip waits for, ms | MiB beside inputs |"
    )
    print("|---:|---:|---:|---:|---:|")
    for ahead, live in ROWS[: told.rows]:
        print(row(ahead, live, told), flush=True)


if __name__ == "__main__":
    main()
