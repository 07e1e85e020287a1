"""A Llama of 7 billion parameters, to be planned and explained without being materialised.

spmdzero explain examples.llama:llama_7b examples/llama_7b.json --meta --own-stage \\
    --batch tokens={devices}x2048:int64 --batch labels={devices}x2048:int64 --tpu v5p:4x4x4
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

HEAD = 128


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            project(x).view(batch, length, dim // HEAD, HEAD).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, dim))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(dim, eps=1e-5), Attention(dim)
        self.norm_2, self.mlp = nn.RMSNorm(dim, eps=1e-5), MLP(dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """Returns the mean cross-entropy; each block is computed again in the backward pass."""

    def __init__(self, *, layers: int, dim: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: `[batch, head, position, HEAD]`, the halves of the last dim as pairs."""
    half = torch.arange(HEAD // 2, device=x.device, dtype=torch.float32)
    position = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angle = position[:, None] * 10000.0 ** (-half / (HEAD // 2))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def llama_7b(layers: int = 32) -> Llama:
    """Llama 2 7B's sizes (arXiv 2307.09288): 6,738,415,616 parameters."""
    return Llama(layers=layers, dim=4096, hidden=11008, vocabulary=32000)


def llama_7b_of_1_layer() -> Llama:
    """One of its 32 layers, between its embedding and its head."""
    return llama_7b(layers=1)
