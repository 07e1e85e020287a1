"""What every peer trains: one model, one stream of data, one set of hyperparameters."""

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

ROWS = 8
"""Rows of one micro-batch on all devices together, whatever their number."""

CLASSES, PIXELS = 10, 32
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a GPT.

    Attributes:
        width, heads, layers, vocabulary: of the model.
        sequence: tokens of a row.
    """

    width: int
    heads: int
    layers: int
    vocabulary: int
    sequence: int


SIZES: Mapping[str, Size] = {
    "gpt-tiny": Size(width=32, heads=2, layers=1, vocabulary=64, sequence=16),
    "gpt-1m": Size(width=128, heads=4, layers=4, vocabulary=512, sequence=128),
    "gpt-10m": Size(width=384, heads=6, layers=5, vocabulary=1024, sequence=128),
    # Of the size that the project's goals were set for.
    "gpt-23m": Size(width=512, heads=8, layers=6, vocabulary=4096, sequence=128),
    "gpt-85m": Size(width=768, heads=12, layers=12, vocabulary=1024, sequence=64),
    # GPT-2's, with a head of its own: for GPUs.
    "gpt-163m": Size(width=768, heads=12, layers=12, vocabulary=50304, sequence=1024),
}
MODELS = (*SIZES, "cnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One training run; equal workloads see equal weights, data and hyperparameters.

    Attributes:
        model: one of `MODELS`.
        devices: virtual devices, or ranks; a divisor of `ROWS`.
        steps: timed steps.
        warm_up: untimed steps before them, of which the first ones compile.
        unread: steps after them whose losses are read together when all are started.
        bf16: whether it is trained as DeepSpeed's `"bf16": {"enabled": true}`, in fp32 otherwise.
    """

    model: str
    devices: int
    steps: int
    warm_up: int = 3
    unread: int = 0
    bf16: bool = False

    def build(self) -> nn.Module:
        """The model with seeded weights, on the CPU; `model(inputs, targets)` is the mean loss."""
        torch.manual_seed(0)
        return ConvNet() if self.model == "cnn" else GPT(SIZES[self.model])

    def build_on_meta(self) -> nn.Module:
        """The same model without values."""
        with torch.device("meta"):
            return self.build()

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of `step`, `ROWS` rows on the CPU."""
        generator = torch.Generator().manual_seed(1000 + step)
        if self.model == "cnn":
            return _images(generator)
        return _tokens(generator, SIZES[self.model])


class Block(nn.Module):
    """A pre-norm transformer block: [rows, sequence, width] -> the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Tokens and targets, int64 [rows, sequence] -> mean loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.token(tokens) + self.position.weight)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """A CNN of 0.4 M parameters: images, fp32 [rows, 3, PIXELS, PIXELS] -> mean loss.

    GroupNorm, because BatchNorm has another meaning in a global forward (statistics of all rows)
    than per replica, so that the peers' losses would differ.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 256)):
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
            layers += [convolution, nn.GroupNorm(8, outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.features(images).mean((2, 3))), targets)


def _tokens(generator: torch.Generator, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that follow x -> 5x + 7, with one tenth of noise: the loss can fall."""
    shape = (ROWS, size.sequence + 1)
    noise = torch.randint(size.vocabulary, shape, generator=generator)
    replaced = torch.rand(shape, generator=generator) < 0.1
    columns = [noise[:, 0]]
    for i in range(1, size.sequence + 1):
        follower = (5 * columns[-1] + 7) % size.vocabulary
        columns.append(torch.where(replaced[:, i], noise[:, i], follower))
    chain = torch.stack(columns, dim=1)
    return chain[:, :-1].contiguous(), chain[:, 1:].contiguous()


def _images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around one fixed picture per class."""
    pictures = torch.randn(CLASSES, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    noise = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return pictures[targets] + noise, targets
