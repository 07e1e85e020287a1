"""What a model with dropout and noise trains to, on four replicas of one device or of more.

A process of eight devices has no mesh of four. So the tests run this as a program for replicas of
one device.
"""

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import arrays

ROWS, LENGTH, WIDTH, HEADS, STEPS, REPLICAS = 8, 16, 64, 4, 3, 4
PARTITION = {"*.qkv.*": "column", "*.fc1.*": "column", "*.o.weight": "row", "*.fc2.weight": "row"}


class Block(nn.Module):
    """A block that draws for what its heads and columns split, and for what each device has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, LENGTH, WIDTH]`, as `x` is."""
        parts = self.qkv(x).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, dropout_p=0.2 if self.training else 0.0)
        x = x + F.dropout(self.o(seen.transpose(1, 2).flatten(2)), 0.1, self.training)
        hidden = self.fc1(x).relu()
        hidden = F.dropout(hidden + 0.1 * torch.rand_like(hidden), 0.3, self.training)
        return x + self.fc2(hidden)


class Drops(nn.Module):
    """Equal blocks and a loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A scalar, and what it is of."""
        out = x
        for block in self.blocks:
            out = block(out)
        return (out - 2 * x).square().mean(), out


def trained(mesh: dict[str, int], *, stage: int, scan: str, blocks: int) -> list[float]:
    """The loss of each step; devices of a replica have to hold the same output."""
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(
        model=Drops(blocks),
        config={
            "train_micro_batch_size_per_gpu": ROWS // REPLICAS,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "spmd": {
                "mesh": mesh, "partition": PARTITION, "scan": scan, "min_shard_elements": 64,
            },
        },
    )  # fmt: skip
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss, out = engine(x)
        parts = torch.stack(arrays.local_shards(out.detach()))
        of_replicas = parts.unflatten(0, (REPLICAS, -1))
        assert torch.equal(of_replicas, of_replicas[:, :1].expand_as(of_replicas))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(json.dumps(trained({"fsdp": REPLICAS}, **json.loads(sys.argv[1]))))
