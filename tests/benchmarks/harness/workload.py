"""What every candidate trains: one model, one stream of data, one config."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

GLOBAL_BATCH = 16
"""Rows of one step on all devices, whatever their number."""

VOCABULARY, SEQUENCE, WIDTH, HEADS, LAYERS = 512, 128, 256, 8, 4
CLASSES, PIXELS = 10, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One training run; equal workloads see equal weights, data and hyperparameters.

    Attributes:
        model: ``"gpt"`` or ``"cnn"``.
        devices: virtual devices, or DeepSpeed's ranks; a divisor of `GLOBAL_BATCH`.
        dtype: ``"fp32"`` or ``"bf16"``.
        stage: the ZeRO stage, 0 to 2.
        steps: timed steps, after the warm-up.
    """

    model: str
    devices: int
    dtype: str
    stage: int
    steps: int

    def config(self) -> dict[str, Any]:
        """The DeepSpeed config that all candidates share."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // self.devices,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            # torch_adam: DeepSpeed's own Adam would compile a C++ extension first.
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True},
            },
            "zero_optimization": {"stage": self.stage},
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        return config

    def build(self) -> nn.Module:
        """The model with seeded weights, on the CPU; `model(inputs, targets)` is the mean loss."""
        torch.manual_seed(0)
        return GPT() if self.model == "gpt" else ConvNet()

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of `step`, `GLOBAL_BATCH` rows on the CPU."""
        generator = torch.Generator().manual_seed(1000 + step)
        return _tokens(generator) if self.model == "gpt" else _images(generator)


class Block(nn.Module):
    """A pre-norm transformer block: [rows, SEQUENCE, WIDTH] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A GPT of 3.5 M parameters: tokens and targets, int64 [rows, SEQUENCE] -> mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.token(tokens) + self.position.weight)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """A CNN of 0.4 M parameters: images, fp32 [rows, 3, PIXELS, PIXELS] -> mean loss.

    GroupNorm, because BatchNorm has another meaning in a global forward (statistics of all rows)
    than per replica, so that the candidates' losses would differ.
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
        features = self.features(images.to(self.head.weight.dtype)).mean((2, 3))
        return F.cross_entropy(self.head(features).float(), targets)


def _tokens(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that follow x -> 5x + 7, with one tenth of noise: the loss can fall."""
    shape = (GLOBAL_BATCH, SEQUENCE + 1)
    noise = torch.randint(VOCABULARY, shape, generator=generator)
    replaced = torch.rand(shape, generator=generator) < 0.1
    columns = [noise[:, 0]]
    for i in range(1, SEQUENCE + 1):
        follower = (5 * columns[-1] + 7) % VOCABULARY
        columns.append(torch.where(replaced[:, i], noise[:, i], follower))
    chain = torch.stack(columns, dim=1)
    return chain[:, :-1].contiguous(), chain[:, 1:].contiguous()


def _images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around one fixed picture per class."""
    pictures = torch.randn(CLASSES, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(CLASSES, (GLOBAL_BATCH,), generator=generator)
    noise = torch.randn(GLOBAL_BATCH, 3, PIXELS, PIXELS, generator=generator)
    return pictures[targets] + noise, targets
