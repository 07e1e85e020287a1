"""What is compiled: models, chips, and who writes the step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what each chip sees of a batch.

    Attributes:
        model: ``"gpt"``, ``"llama"``, ``"moe"``, ``"bert"``, ``"vit"`` or ``"resnet"``.
        rows: of each chip.
        length: tokens of a row; of images, pixels along a side.
        layers, width, heads, kv_heads, inner, vocabulary: of a transformer; `inner` is the MLP's
            width. Of a ResNet, `layers` is the number of bottlenecks of each of its four stages,
            0 for a ResNet-50's, `width` the channels of the first and `vocabulary` the classes. Of
            a vision transformer `vocabulary` is the classes too.
        experts, active: MLPs of a layer of a mixture, and those that a token goes through.
        head_size: of a head, 0 where the heads share `width`.
        patch: pixels along a side of what a vision transformer has for a token.
        recompute: whether a block keeps its input alone for the backward.
        untied: whether the head of a Llama has a weight of its own. The torch one is then
            transformers' own module.
        stage: of ZeRO, in rows of spmdzero.
    """

    model: str
    rows: int
    length: int
    layers: int
    width: int
    vocabulary: int
    heads: int = 1
    kv_heads: int = 1
    inner: int = 0
    experts: int = 0
    active: int = 0
    head_size: int = 0
    patch: int = 16
    recompute: bool = False
    untied: bool = False
    stage: int = 2

    @property
    def tokens(self) -> int:
        """Of each chip and step; images where there are no tokens."""
        return self.rows if self.is_of_images else self.rows * self.length

    @property
    def is_of_images(self) -> bool:
        """Whether a row is an image of `length` x `length` pixels."""
        return self.model in ("resnet", "vit")

    @property
    def size(self) -> int:
        """The width of a head."""
        return self.head_size or self.width // self.heads

    @property
    def stages(self) -> tuple[int, ...]:
        """Bottlenecks of each stage of a ResNet."""
        return (3, 4, 6, 3) if self.layers == 0 else (self.layers,) * 4


_LLAMA = Case(
    model="llama", rows=4, length=2048, layers=16, width=2048, heads=32, kv_heads=8, inner=8192,
    vocabulary=128256, recompute=True,
)  # fmt: skip
_LLAMA_8B = Case(
    model="llama", rows=3, length=8192, layers=32, width=4096, heads=32, kv_heads=8, inner=14336,
    vocabulary=128256, recompute=True, untied=True, stage=3,
)  # fmt: skip
CASES: Mapping[str, Case] = {
    "gpt2": Case(
        model="gpt", rows=4, length=1024, layers=12, width=768, heads=12, kv_heads=12, inner=3072,
        vocabulary=50304,
    ),
    "llama-2k": _LLAMA,
    "llama-8b": _LLAMA_8B,
    "llama-8b-7x": _LLAMA_8B,
    "llama-70b": Case(
        model="llama", rows=2, length=8192, layers=80, width=8192, heads=64, kv_heads=8,
        inner=28672, vocabulary=128256, recompute=True, untied=True, stage=3,
    ),
    "llama-405b": Case(
        model="llama", rows=3, length=8192, layers=126, width=16384, heads=128, kv_heads=8,
        inner=53248, vocabulary=128256, recompute=True, untied=True, stage=3,
    ),
    "mistral-7b": dataclasses.replace(_LLAMA_8B, rows=6, vocabulary=32000),
    "qwen3-moe": Case(
        model="moe", rows=2, length=4096, layers=12, width=2048, heads=32, kv_heads=4,
        head_size=128, inner=768, experts=128, active=8, vocabulary=151936, recompute=True,
        untied=True, stage=3,
    ),
    "qwen3-235b": Case(
        model="moe", rows=16, length=4096, layers=94, width=4096, heads=64, kv_heads=4,
        head_size=128, inner=1536, experts=128, active=8, vocabulary=151936, recompute=True,
        untied=True, stage=3,
    ),
    "bert": Case(
        model="bert", rows=32, length=512, layers=12, width=768, heads=12, kv_heads=12, inner=3072,
        vocabulary=30522,
    ),
    "vit": Case(
        model="vit", rows=64, length=224, layers=12, width=768, heads=12, kv_heads=12, inner=3072,
        vocabulary=1000,
    ),
    "resnet": Case(model="resnet", rows=64, length=224, layers=0, width=64, vocabulary=1000),
}  # fmt: skip
_TINY_LLAMA = Case(
    model="llama", rows=1, length=512, layers=2, width=256, heads=4, kv_heads=2, inner=512,
    vocabulary=1024, recompute=True, untied=True, stage=3,
)  # fmt: skip
_TINY_MIXTURE = Case(
    model="moe", rows=1, length=256, layers=2, width=128, heads=2, kv_heads=1, head_size=128,
    inner=128, experts=4, active=2, vocabulary=1024, recompute=True, untied=True, stage=3,
)  # fmt: skip
TINY: Mapping[str, Case] = {
    "gpt2": Case(
        model="gpt", rows=1, length=256, layers=2, width=256, heads=4, kv_heads=4, inner=1024,
        vocabulary=1024,
    ),
    "llama-2k": Case(
        model="llama", rows=1, length=256, layers=4, width=256, heads=4, kv_heads=2, inner=512,
        vocabulary=1024, recompute=True,
    ),
    "llama-8b": _TINY_LLAMA,
    "llama-8b-7x": _TINY_LLAMA,
    "llama-70b": dataclasses.replace(_TINY_LLAMA, layers=4),
    "llama-405b": dataclasses.replace(_TINY_LLAMA, layers=4),
    "mistral-7b": dataclasses.replace(_TINY_LLAMA, rows=2),
    "qwen3-moe": _TINY_MIXTURE,
    "qwen3-235b": _TINY_MIXTURE,
    "bert": Case(
        model="bert", rows=2, length=256, layers=2, width=256, heads=4, kv_heads=4, inner=1024,
        vocabulary=1024,
    ),
    "vit": Case(
        model="vit", rows=2, length=64, layers=2, width=256, heads=4, kv_heads=4, inner=512,
        vocabulary=64,
    ),
    "resnet": Case(model="resnet", rows=2, length=64, layers=1, width=16, vocabulary=64),
}  # fmt: skip
SIZES = {"full": CASES, "tiny": TINY}
TITLES = {
    "gpt2": "GPT-2, 124 M parameters",
    "llama-2k": "Llama 3.2's 1 B, 4 rows of 2,048 tokens a chip",
    "llama-8b": "Llama 3.1 8B, 3 rows of 8,192 tokens a chip",
    "llama-8b-7x": "Llama 3.1 8B, 3 rows of 8,192 tokens a device, 8 dual chips",
    "llama-70b": "Llama 3.1 70B, 2 rows of 8,192 tokens a device, 64 dual chips",
    "llama-405b": "Llama 3.1 405B, 3 rows of 8,192 tokens a device, 256 dual chips",
    "mistral-7b": "Mistral 7B, 6 rows of 8,192 tokens a chip",
    "qwen3-235b": "Qwen3-235B-A22B, 16 rows of 4,096 tokens a device, 256 dual chips",
    "qwen3-moe": "Qwen3-MoE of 30 B cut to 12 of its 48 layers, 2 rows of 4,096 tokens a chip",
    "bert": "BERT-base",
    "vit": "ViT-B/16",
    "resnet": "ResNet-50",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to write the step.

    Attributes:
        title: in the table.
        writer: the module of this package that traces it.
        options: told to it.
        calibrates: seconds a step that others measured of it, see `calibration`.
    """

    title: str
    writer: str
    options: Mapping[str, Any]
    calibrates: float | None = None


def _ours(title: str, **options: Any) -> Row:
    return Row(title=title, writer="ours", options=options)


def _jax(title: str, *, measured: float | None = None, **options: Any) -> Row:
    return Row(title=title, writer="by_hand", options=options, calibrates=measured)


_MAXTEXT = {
    "attention": "splash", "loss": "chunked", "region": True, "scan": True, "zero": 3,
    "recompute": "all",
}  # fmt: skip
_AS_THE_RECORD = {"keep": ["context", "q_proj", "k_proj", "v_proj"]}
ROWS: Mapping[str, Row] = {
    "ours": _ours("spmdzero"),
    "ours-wire": _ours("its wire hidden, `xla_flags`", spmd={"xla_flags": "v5e"}),
    "ours-plain-attention": _ours("without the attention kernel", spmd={"attention": "plain"}),
    "ours-plain-loss": _ours("without the fused loss", loss="plain"),
    "ours-scan": _ours("with its blocks in a loop, `scan`", spmd={"scan": "on"}),
    "ours-context": _ours(
        "the same, attention's output kept on the host",
        spmd={"scan": "on", "recompute": {"offload": ["context"]}},
    ),
    "ours-kept": _ours(
        "with its blocks in a loop, attention's output and what it takes kept",
        spmd={"scan": "on", "recompute": _AS_THE_RECORD},
    ),
    "ours-kept-flags": _ours(
        "the same, `xla_flags`",
        spmd={"scan": "on", "xla_flags": "tpu7x", "recompute": _AS_THE_RECORD},
    ),
    "ours-kept-moments": _ours(
        "the same, Adam's first moment in bf16",
        spmd={
            "scan": "on", "xla_flags": "tpu7x", "moments": {"exp_avg": "bfloat16"},
            "recompute": _AS_THE_RECORD,
        },
    ),
    "ours-kept-fp8": _ours(
        "the same, linear layers in fp8",
        spmd={
            "scan": "on", "xla_flags": "tpu7x", "moments": {"exp_avg": "bfloat16"},
            "recompute": _AS_THE_RECORD, "products": {"dtype": "fp8"},
        },
    ),
    "ours-scan-fp8": _ours(
        "the same, linear layers in fp8", spmd={"scan": "on", "products": {"dtype": "fp8"}}
    ),
    "ours-context-int8": _ours(
        "the same, linear layers in int8",
        spmd={
            "scan": "on", "recompute": {"offload": ["context"]}, "products": {"dtype": "int8"},
        },
    ),
    "ours-states8": _ours(
        "with its blocks in a loop, attention's output kept on the chips, Adam's moments in 8 bits",
        spmd={"scan": "on", "recompute": {"keep": ["context"]}},
        optimizer={"type": "AdamW8bit"},
    ),
    "ours-hosted": _ours(
        "with its blocks in a loop, their inputs and attention's output kept on the host",
        spmd={"scan": "on", "recompute": {"offload": ["input", "context"]}},
    ),
    "ours-405b": _ours(
        "in a loop, keys and values kept, blocks' inputs and MLPs' outputs on the host, Adam's "
        "first moment in bf16, `xla_flags`",
        spmd={
            "scan": "on", "xla_flags": "tpu7x", "moments": {"exp_avg": "bfloat16"},
            "recompute": {"keep": ["k_proj", "v_proj"], "offload": ["input", "mlp"]},
        },
    ),
    "ours-nothing": _ours("with nothing computed again", spmd={"recompute": "nothing"}),
    "jax-plain": _jax("JAX by hand, plain"),
    "jax-splash": _jax(
        "JAX by hand, splash attention", attention="splash", loss="whole", region=True
    ),
    "jax-scan": _jax("JAX by hand, splash, chunked loss, scan, as MaxText", **_MAXTEXT),
    "jax-qkv": _jax(
        "the same, attention's projections kept on the host",
        **_MAXTEXT | {"recompute": "qkv-on-host"},
    ),
}  # fmt: skip
TABLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpt2": ("v5e:2x4", (
        "ours", "ours-wire", "ours-plain-attention", "ours-plain-loss", "ours-scan", "jax-splash",
        "jax-scan",
    )),
    "llama-2k": ("v6e:2x4", ("ours-nothing",)),
    "llama-8b": (
        "v6e:2x4",
        ("ours-scan", "ours-context", "ours-states8", "ours-context-int8", "jax-scan", "jax-qkv"),
    ),
    "llama-8b-7x": ("tpu7x:2x2x2", ("ours-scan", "ours-scan-fp8")),
    "llama-70b": (
        "tpu7x:4x4x4", ("ours-kept", "ours-kept-flags", "ours-kept-moments", "ours-kept-fp8"),
    ),
    "llama-405b": ("tpu7x:4x8x8", ("ours-405b",)),
    "mistral-7b": ("v6e:2x4", ("ours-context", "ours-hosted", "jax-qkv")),
    "qwen3-moe": ("v6e:2x4", ("ours-scan", "jax-scan")),
    "qwen3-235b": ("tpu7x:4x8x8", ("ours-scan", "jax-scan")),
    "bert": ("v5e:2x4", ("ours", "jax-splash")),
    "vit": ("v5e:2x4", ("ours", "jax-plain")),
    "resnet": ("v5e:2x4", ("ours", "jax-plain")),
}  # fmt: skip
"""Case -> the chips that it is compiled for, and its rows of `ROWS`."""
TOPOLOGIES = tuple(dict.fromkeys(topology for topology, _ in TABLES.values()))
CALIBRATION: Mapping[str, Row] = {
    "measured-plain": _jax(
        "plain attention, everything computed again", region=True, zero=3, scan=True,
        recompute="all", attention="repeated", measured=0.478,
    ),
    "measured-splash": _jax(
        "splash attention, repeated keys and values", region=True, zero=3, scan=True,
        recompute="all", attention="splash-repeated", measured=0.386,
    ),
    "measured-grouped": _jax(
        "splash attention, grouped queries", region=True, zero=3, scan=True,
        recompute="all", attention="splash", measured=0.366,
    ),
    "measured-lighter": _jax(
        "the same, its projections to queries, keys and values kept", region=True, zero=3,
        scan=True, recompute="qkv", attention="splash", measured=0.359,
    ),
    "measured-maxtext": _jax(
        "MaxText, everything computed again", region=True, zero=3, scan=True, recompute="all",
        attention="splash", measured=0.343,
    ),
    "measured-maxtext-lighter": _jax(
        "MaxText, these projections kept", region=True, zero=3, scan=True, recompute="qkv",
        attention="splash", measured=0.337,
    ),
}  # fmt: skip
CALIBRATED = "llama-2k"
"""The case of `CALIBRATION`."""
MEASURED_8B = 3.443
"""Seconds a step of "llama-8b" by MaxText, on 8 chips of v6e: `jax-qkv` is written as it is."""


def rows_of(case: str) -> dict[str, Row]:
    """The rows of a table, by name."""
    rows = {name: ROWS[name] for name in TABLES[case][1]}
    return rows | (CALIBRATION if case == CALIBRATED else {})
