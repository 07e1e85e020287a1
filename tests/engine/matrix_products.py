"""Trains a transformer block beside torch; prints how far apart the parameters are after each step.

`python -m tests.engine.matrix_products`
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spmdzero

ROWS, LENGTH, WIDTH, HEADS, STEPS = 8, 128, 384, 6, 3


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(x), x.flip(-1))


def make() -> Block:
    torch.manual_seed(0)
    return Block()


def differences() -> list[float]:
    """The largest difference of a parameter, relative to the largest of its tensor."""
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 10.0}},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    expected = make()
    optimizer = torch.optim.SGD(expected.parameters(), lr=10.0)
    engine, *_ = spmdzero.initialize(model=make(), config=config)
    found = []
    for step in range(STEPS):
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        expected(x).backward()
        optimizer.step()
        engine.backward(engine(x))
        engine.step()
        pairs = zip(expected.parameters(), engine.module.parameters(), strict=True)
        apart = [((a - b.cpu()).abs().max() / a.abs().max()).item() for a, b in pairs]
        found.append(max(apart))
    return found


if __name__ == "__main__":
    print(json.dumps(differences()))
