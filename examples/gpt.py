"""A byte-level GPT: pre-LN blocks, learned positions, a head of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The size of a GPT.

    Attributes:
        layers: number of blocks.
        heads: attention heads in a block; divides `width`.
        width: features of a token.
        window: the longest sequence, in bytes.
    """

    layers: int
    heads: int
    width: int
    window: int


class Block(nn.Module):
    """Attention, then an MLP, each behind its own LayerNorm and residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> [batch, seq, width]."""
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention, [batch, seq, width] -> [batch, seq, width]."""
        batch, seq, width = x.shape
        query, key, value = (
            part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, seq, width))


class GPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Parameter(torch.empty(config.window, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        # Well above the positions: which byte it is tells most about the next one.
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.position, std=0.01)
        for block in self.blocks:
            # Each block adds twice to the residual stream (GPT-2, section 2.3).
            for last in (block.project, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 * (2 * config.layers) ** -0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The next byte's logits, or the mean loss if `targets` are given.

        Args:
            tokens: int64 [batch, seq].
            targets: int64 [batch, seq], the byte after each token.

        Returns logits [batch, seq, 256], or a float32 scalar.
        """
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        # float32: a bf16 softmax over the vocabulary loses the loss's last digits.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
