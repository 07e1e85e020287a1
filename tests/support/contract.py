"""Model, initial weights and data of the recorded DeepSpeed runs, from numpy generators only."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROWS, SEQ, VOCAB, DIM, HEADS, LAYERS = 8, 32, 128, 64, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        heads = (
            t.view(batch, length, HEADS, dim // HEADS).transpose(1, 2)
            for t in self.c_attn(x).split(dim, dim=2)
        )
        q, k, v = heads
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(dim // HEADS))
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(batch, length, dim))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(DIM), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(DIM), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The recorded model; `forward(x, y)` returns the mean cross-entropy, `logits(x)` the rest."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.h = nn.ModuleList([Block() for _ in range(layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        z = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            z = block(z)
        logits = self.lm_head(self.ln_f(z)).float()
        if y is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def make_model(seed: int = 1234, *, layers: int = LAYERS) -> GPT:
    """The model with its recorded initial weights.

    Args:
        seed: of the weights.
        layers: fewer than recorded are enough to see what a compiler makes of it.
    """
    model = GPT(layers)
    rng = np.random.Generator(np.random.PCG64(seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
            if ".ln_" in "." + name and name.endswith("weight"):
                draw = 1.0 + 0.02 * draw
            else:
                draw = (0.02 if name.endswith("bias") else 0.08) * draw
            parameter.copy_(torch.from_numpy(draw.astype(np.float32)))
    return model


def make_batch(step: int, micro: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, [rows, SEQ] int64 each: x' = (5x + 7) % VOCAB with 10 % noise."""
    rng = np.random.Generator(np.random.PCG64([777, step, micro]))
    tokens = np.empty((rows, SEQ + 1), dtype=np.int64)
    tokens[:, 0] = rng.integers(0, VOCAB, size=rows)
    noise = rng.random((rows, SEQ)) < 0.1
    drawn = rng.integers(0, VOCAB, size=(rows, SEQ))
    for k in range(SEQ):
        tokens[:, k + 1] = np.where(noise[:, k], drawn[:, k], (5 * tokens[:, k] + 7) % VOCAB)
    whole = torch.from_numpy(tokens)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
