"""The models in torch, as a user would write them; on the meta device."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness.workload import GPT, Size
from torch import nn

from on_tpu.cases import Case
from spmdzero.nn import linear_cross_entropy


def build(case: Case, *, fused_loss: bool) -> nn.Module:
    """`model(inputs, targets)` is the mean loss.

    Args:
        case: which.
        fused_loss: whether it is spmdzero's, which holds no logits; for transformers' models the
            config says so.
    """
    llama = functools.partial(Transformers, "Llama") if case.untied else Llama
    made: dict[str, Callable[[Case], nn.Module]] = {
        "gpt": _gpt, "llama": llama, "moe": functools.partial(Transformers, "Qwen3Moe"),
        "bert": Bert, "vit": Vit, "resnet": ResNet,
    }  # fmt: skip
    with torch.device("meta"):
        model = made[case.model](case)
    model.fused = fused_loss
    return model


def batch_of(case: Case, *, devices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all devices, without values."""
    rows = case.rows * devices
    if case.is_of_images:
        images = torch.zeros(rows, 3, case.length, case.length, dtype=torch.bfloat16, device="meta")
        return images, torch.zeros(rows, dtype=torch.int64, device="meta")
    tokens = torch.zeros(rows, case.length, dtype=torch.int64, device="meta")
    return tokens, tokens.clone()


class _WithLoss(nn.Module):
    """Mean cross-entropy over `head`, without its logits where it is `fused`."""

    fused = False

    def loss(self, hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor) -> torch.Tensor:
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.fused:
            return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)
        return F.cross_entropy(head(hidden).float(), targets)


def _gpt(case: Case) -> nn.Module:
    size = Size(
        width=case.width, heads=case.heads, layers=case.layers, vocabulary=case.vocabulary,
        sequence=case.length,
    )  # fmt: skip
    return _Gpt(size)


class _Gpt(GPT, _WithLoss):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.fused:
            return super().forward(tokens, targets)
        hidden = self.blocks(self.token(tokens) + self.position.weight)
        return self.loss(self.norm(hidden), self.head, targets)


class LlamaBlock(nn.Module):
    """[rows, length, width] -> the same."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.heads, self.kv_heads = case.heads, case.kv_heads
        self.size = case.width // case.heads
        kv = case.kv_heads * self.size
        self.norm_1, self.norm_2 = nn.RMSNorm(case.width), nn.RMSNorm(case.width)
        self.q = nn.Linear(case.width, case.width, bias=False)
        self.k = nn.Linear(case.width, kv, bias=False)
        self.v = nn.Linear(case.width, kv, bias=False)
        self.out = nn.Linear(case.width, case.width, bias=False)
        self.gate = nn.Linear(case.width, case.inner, bias=False)
        self.up = nn.Linear(case.width, case.inner, bias=False)
        self.down = nn.Linear(case.inner, case.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        y = self.norm_1(x)
        q, k, v = (
            to(y).view(rows, length, heads, self.size).transpose(1, 2)
            for to, heads in (
                (self.q, self.heads),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(_WithLoss):
    """Tokens and targets, int64 [rows, length] -> mean loss; the head is the embedding."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.size = case.width // case.heads
        self.token = nn.Embedding(case.vocabulary, case.width)
        self.blocks = nn.ModuleList(LlamaBlock(case) for _ in range(case.layers))
        self.norm = nn.RMSNorm(case.width)
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens)
        cos, sin = self._turns(tokens.shape[1], hidden)
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        return self.loss(self.norm(hidden), self.head, targets)

    def _turns(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        halves = torch.arange(0, self.size, 2, device=like.device, dtype=torch.float32) / self.size
        places = torch.arange(length, device=like.device, dtype=torch.float32)
        angles = torch.outer(places, 500000.0**-halves).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Transformers(nn.Module):
    """transformers' own module of a family, its head with a weight of its own; as `Llama`."""

    def __init__(self, family: str, case: Case) -> None:
        super().__init__()
        import transformers

        experts = {
            "moe_intermediate_size": case.inner, "num_experts": case.experts,
            "num_experts_per_tok": case.active, "norm_topk_prob": True,
        }  # fmt: skip
        config = getattr(transformers, f"{family}Config")(
            vocab_size=case.vocabulary, hidden_size=case.width, intermediate_size=case.inner,
            num_hidden_layers=case.layers, num_attention_heads=case.heads, head_dim=case.size,
            num_key_value_heads=case.kv_heads, max_position_embeddings=case.length,
            rope_theta=500000.0, rms_norm_eps=1e-5, use_cache=False,
            **(experts if case.experts else {}),
        )  # fmt: skip
        self.model = getattr(transformers, f"{family}ForCausalLM")(config)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=targets).loss


class Vit(nn.Module):
    """transformers' vision transformer: images, bf16 [rows, 3, pixels, pixels], int64 [rows]."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=case.width, intermediate_size=case.inner, num_hidden_layers=case.layers,
            num_attention_heads=case.heads, image_size=case.length, patch_size=case.patch,
            num_labels=case.vocabulary, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = ViTForImageClassification(config)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(pixel_values=images).logits, targets)


class BertBlock(nn.Module):
    """[rows, length, width] -> the same; norms after the sums."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.width
        self.heads = case.heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm_1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, case.inner), nn.Linear(case.inner, width)
        self.norm_2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            to(x).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for to in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = self.norm_1(x + self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Bert(_WithLoss):
    """Tokens and targets, int64 [rows, length] -> mean loss of a masked language model.

    Without padding and dropout; every position has a target.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.token = nn.Embedding(case.vocabulary, case.width)
        self.position = nn.Embedding(case.length, case.width)
        self.norm = nn.LayerNorm(case.width)
        self.blocks = nn.Sequential(*(BertBlock(case) for _ in range(case.layers)))
        self.transform = nn.Linear(case.width, case.width)
        self.last = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocabulary)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.norm(self.token(tokens) + self.position.weight))
        return self.loss(self.last(F.gelu(self.transform(hidden))), self.head, targets)


class Bottleneck(nn.Module):
    """A block of a ResNet: images [rows, channels, height, width]."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv_1, self.norm_1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv_2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(inner)
        self.conv_3, self.norm_3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = F.relu(self.norm_2(self.conv_2(y)))
        return F.relu(self.norm_3(self.conv_3(y)) + self.short(x))


class ResNet(nn.Module):
    """Images, bf16 [rows, 3, pixels, pixels], and int64 [rows] -> mean loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.width
        self.conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(case.stages):
            inner = width * 2**stage
            for i in range(count):
                blocks.append(Bottleneck(inputs, inner, 2 if i == 0 and stage else 1))
                inputs = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, case.vocabulary)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 3, stride=2, padding=1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), targets)
