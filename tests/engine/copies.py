"""Trains a few layers of the same shapes; prints what the compiled step copies, by XLA's own dump.

`XLA_FLAGS=--xla_dump_to=FOLDER python -m tests.engine.copies captured FOLDER bf16`
"""

import json
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from tests.support.engines import replays

WIDTH, LAYERS, ROWS, STEPS = 64, 4, 8, 5


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(self.layers[0][1].weight.dtype)
        for layer in self.layers:
            h = h + layer(h)
        return F.mse_loss(h.float(), x.flip(-1))


def train(style: str, precision: str) -> None:
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "spmd": {"min_shard_elements": 64},
    }
    engine, *_ = spmdzero.initialize(model=Layers(), config=config)
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        if style == "captured":
            engine.train_batch(iter([x])).item()
        else:
            engine.backward(engine(x))
            engine.step()
    assert replays(engine)


def copied(folder: Path) -> list[str]:
    """Shapes of the inputs and results that the largest program copies whole."""
    found = folder.glob("*cpu_after_optimizations.txt")
    text = max(found, key=lambda path: path.stat().st_size).read_text()
    assert "input_output_alias" in text.partition("\n")[0]
    return re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text.partition("\nENTRY")[2])


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[3])
    print(json.dumps(copied(Path(sys.argv[2]))))
