"""A model and data small enough to compile in a second or two, from numpy generators only."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROWS, SEQ, VOCAB, WIDTH, HIDDEN = 8, 6, 96, 24, 100


class Model(nn.Module):
    """Embedding, a residual MLP with LayerNorm, and a head; `forward(x, y)` is the mean loss.

    `HIDDEN x WIDTH` is odd enough that shards of two devices meet inside a matrix's row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Parameter(torch.zeros(SEQ, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.embed(x) + self.place
        z = z + self.down(F.gelu(self.up(self.norm(z))))
        return F.cross_entropy(self.head(z).float().flatten(0, 1), y.flatten())


def make_model() -> Model:
    """The model with its initial weights."""
    model = Model()
    rng = np.random.Generator(np.random.PCG64(4321))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
            around = 1.0 if name == "norm.weight" else 0.0
            # Large enough that a gradient's norm is above some of the clipping values.
            parameter.copy_(torch.from_numpy(np.float32(around) + np.float32(0.2) * draw))
    return model


def make_batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the global micro-batch, int64 [ROWS, SEQ] each."""
    rng = np.random.Generator(np.random.PCG64([99, step, micro]))
    tokens = rng.integers(0, VOCAB, size=(ROWS, SEQ))
    return torch.from_numpy(tokens), torch.from_numpy((5 * tokens + 7) % VOCAB)
