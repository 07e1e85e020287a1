"""Trains with pairs of devices that share a replica's work, and prints losses and norm as JSON."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import spmdzero


class Pair(nn.Module):
    """Two layers, of which one makes what the other takes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.fc2(self.fc1(x).relu())).square().mean()


def main(stage: int, style: str) -> None:
    """Four steps of the engine's own loader."""
    config = {
        "train_batch_size": 32,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "spmd": {
            "mesh": {"fsdp": 4, "tensor": 2},
            "min_shard_elements": 64,
            "partition": {"fc1.*": "column", "fc2.weight": "row"},
        },
    }
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(128, 64, generator=torch.Generator().manual_seed(1)))
    engine, _, loader, _ = spmdzero.initialize(model=Pair(), config=config, training_data=rows)
    losses = []
    for (x,) in loader:
        if style == "train_batch":
            loss = engine.train_batch(iter([(x,)]))
        else:
            loss = engine(x)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    print(json.dumps([*losses, float(engine.get_global_grad_norm())]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
