"""A small model of equal blocks, and its batch."""

from typing import Any

import torch
from torch import nn

WIDTH, WORDS, LENGTH, ROWS = 128, 256, 64, 32
CONFIG: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Predicts its own tokens, `[rows, length]`; returns the loss."""

    def __init__(self, *, width: int = WIDTH, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(made.flatten(0, 1), tokens.flatten())


def tokens(rows: int = ROWS) -> torch.Tensor:
    """A batch without values."""
    return torch.empty(rows, LENGTH, dtype=torch.long, device="meta")
