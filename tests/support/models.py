"""Small models of three kinds, as wide as the TPU's tiles of 8 x 128 ask of each shard of 8."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.support import contract

WIDTH, VOCABULARY, LENGTH, CLASSES = 512, 1024, 64, 128


def gpt() -> nn.Module:
    """The model of the recorded DeepSpeed runs, one layer, wider."""
    sizes = {"DIM": WIDTH, "VOCAB": VOCABULARY, "SEQ": LENGTH, "HEADS": 8}
    before = {name: getattr(contract, name) for name in sizes}
    try:
        for name, value in sizes.items():
            setattr(contract, name, value)
        return contract.GPT(layers=1)
    finally:
        for name, value in before.items():
            setattr(contract, name, value)


def bert() -> nn.Module:
    """Hugging Face's, one layer, its decoder tied to its embedding."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY, num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=8,
            intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, attn_implementation="sdpa",
        )
    )  # fmt: skip


def small_gpt2() -> nn.Module:
    """Hugging Face's, one narrow layer, for 32 of 128 tokens."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_embd=32, n_head=2, vocab_size=128, n_positions=32,
            bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        )
    )  # fmt: skip


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, channels), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv(channels, channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(inner)))


class ResNet(nn.Module):
    """A stem, a basic block and a classifier; returns the loss."""

    def __init__(self, channels: int = 256) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels)
        self.block, self.head = Residual(channels), nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.stem(x.to(self.stem.weight.dtype))))
        return F.cross_entropy(self.head(self.block(x).mean((2, 3))).float(), y)


def _conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)


class Kind(NamedTuple):
    """How to make a model, and a micro-batch of so many rows for it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]


def _tokens(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)


def _images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(rows, 3, 10, 10, generator=generator)
    return images, torch.randint(CLASSES, (rows,), generator=generator)


KINDS = {
    "gpt": Kind(gpt, lambda rows: (_tokens(rows), _tokens(rows))),
    "bert": Kind(bert, lambda rows: {"input_ids": _tokens(rows), "labels": _tokens(rows)}),
    "resnet": Kind(ResNet, _images),
}
