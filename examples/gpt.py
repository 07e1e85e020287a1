"""A small GPT: rotary positions, a squared ReLU, norms without weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The size of a GPT.

    Attributes:
        layers: number of blocks.
        heads: attention heads in a block; `width` is an even multiple of it.
        width: features of a token.
        window: the longest sequence, in tokens.
        vocabulary: number of different tokens.
    """

    layers: int
    heads: int
    width: int
    window: int
    vocabulary: int


def norm(x: Tensor) -> Tensor:
    """[..., width], with a mean square of 1.

    Without weights: on the CPU each small tensor is summed over the devices by a collective of
    its own.
    """
    return F.rms_norm(x, x.shape[-1:])


class Rotary(nn.Module):
    """Turns queries and keys by their positions, so that attention sees distances.

    Formula (34) of arXiv 2104.09864, on the two halves of a head instead of neighbours.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, *, head: int, window: int) -> None:
        super().__init__()
        speeds = 10000.0 ** (-torch.arange(head // 2) / (head // 2))
        angles = torch.arange(window)[:, None] * speeds
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, heads, seq, head] -> [batch, heads, seq, head]."""
        left, right = x.chunk(2, dim=-1)
        cosines, sines = (table[: x.shape[2]].to(x.dtype) for table in (self.cosines, self.sines))
        return torch.cat([left * cosines - right * sines, left * sines + right * cosines], dim=-1)


class Block(nn.Module):
    """Attention, then an MLP, each behind its own norm and residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        for linear in (self.query_key_value, self.widen):
            nn.init.normal_(linear.weight, std=0.6 * width**-0.5)
        # What a block adds starts at zero: a deep model then learns as steadily as a shallow one.
        for last in (self.project, self.narrow):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[batch, seq, width] -> [batch, seq, width]."""
        x = x + self.attend(norm(x), rotary)
        return x + self.narrow(self.widen(norm(x)).relu().square())

    def attend(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Causal self-attention, [batch, seq, width] -> [batch, seq, width]."""
        batch, seq, width = x.shape
        query, key, value = (
            part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(rotary(query), rotary(key), value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, seq, width))


class GPT(nn.Module):
    """Predicts the next token of a text."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.rotary = Rotary(head=config.width // config.heads, window=config.window)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        nn.init.zeros_(self.head.weight)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, at: Tensor | None = None
    ) -> Tensor:
        """The mean loss if `targets` are given, else the logits of the token after position `at`.

        Args:
            tokens: int64 [batch, seq].
            targets: int64 [batch, seq], the token after each token.
            at: int64 [batch], a position of each row.

        Returns a float32 scalar, or logits [batch, vocabulary].
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        x = norm(x)
        if at is not None:
            return self.head(x.take_along_dim(at[:, None, None], dim=1)[:, 0])
        # float32: a bf16 softmax over the vocabulary loses the loss's last digits.
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())
