"""What is compiled: models, chips, and who writes the step."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "v5e:4x4", "v5p:2x2x2")
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what each chip sees of a batch.

    Attributes:
        model: ``"gpt"``, ``"llama"``, ``"bert"`` or ``"resnet"``.
        rows: of each chip.
        length: tokens of a row; of images, pixels along a side.
        layers, width, heads, kv_heads, inner, vocabulary: of a transformer; `inner` is the MLP's
            width. Of a ResNet, `layers` is the number of bottlenecks of each of its four stages,
            0 for a ResNet-50's, `width` the channels of the first and `vocabulary` the classes.
        recompute: whether a block keeps its input alone for the backward.
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
    recompute: bool = False

    @property
    def tokens(self) -> int:
        """Of each chip and step; images where there are no tokens."""
        return self.rows if self.model == "resnet" else self.rows * self.length

    @property
    def stages(self) -> tuple[int, ...]:
        """Bottlenecks of each stage of a ResNet."""
        return (3, 4, 6, 3) if self.layers == 0 else (self.layers,) * 4


_LLAMA = Case(
    model="llama", rows=4, length=2048, layers=16, width=2048, heads=32, kv_heads=8, inner=8192,
    vocabulary=128256, recompute=True,
)  # fmt: skip
CASES: Mapping[str, Case] = {
    "gpt2": Case(
        model="gpt", rows=4, length=1024, layers=12, width=768, heads=12, kv_heads=12, inner=3072,
        vocabulary=50304,
    ),
    "llama-2k": _LLAMA,
    "llama-8k": dataclasses.replace(_LLAMA, rows=1, length=8192),
    "bert": Case(
        model="bert", rows=32, length=512, layers=12, width=768, heads=12, kv_heads=12, inner=3072,
        vocabulary=30522,
    ),
    "resnet": Case(model="resnet", rows=64, length=224, layers=0, width=64, vocabulary=1000),
}  # fmt: skip
TINY: Mapping[str, Case] = {
    "gpt2": Case(
        model="gpt", rows=1, length=256, layers=2, width=256, heads=4, kv_heads=4, inner=1024,
        vocabulary=1024,
    ),
    "llama-2k": Case(
        model="llama", rows=1, length=256, layers=4, width=256, heads=4, kv_heads=2, inner=512,
        vocabulary=1024, recompute=True,
    ),
    "llama-8k": Case(
        model="llama", rows=1, length=512, layers=2, width=256, heads=4, kv_heads=2, inner=512,
        vocabulary=1024, recompute=True,
    ),
    "bert": Case(
        model="bert", rows=2, length=256, layers=2, width=256, heads=4, kv_heads=4, inner=1024,
        vocabulary=1024,
    ),
    "resnet": Case(model="resnet", rows=2, length=64, layers=1, width=16, vocabulary=64),
}  # fmt: skip
SIZES = {"full": CASES, "tiny": TINY}
TITLES = {
    "gpt2": "GPT-2, 124 M parameters",
    "llama-2k": "Llama 3.2's 1 B, rows of 2,048 tokens",
    "llama-8k": "Llama 3.2's 1 B, rows of 8,192 tokens",
    "bert": "BERT-base",
    "resnet": "ResNet-50",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to write the step.

    Attributes:
        title: in the table.
        writer: the module of this package that traces it.
        options: told to it.
        models: the models that it differs for; None for all.
        flags: whether it is compiled with the flags of the TPU compiler that spmdzero has for the
            chip.
        calibrates: seconds a step that others measured of it, see `calibration`.
    """

    title: str
    writer: str
    options: Mapping[str, Any]
    models: tuple[str, ...] | None = None
    flags: bool = False
    calibrates: float | None = None


_TOKENS = ("gpt", "llama", "bert")


def _ours(
    title: str, *, models: tuple[str, ...] | None = None, flags: bool = False, **options: Any
) -> Row:
    return Row(title=title, writer="ours", options=options, models=models, flags=flags)


def _jax(
    title: str,
    *,
    models: tuple[str, ...] | None = None,
    flags: bool = False,
    measured: float | None = None,
    **options: Any,
) -> Row:
    return Row(
        title=title, writer="by_hand", options=options, models=models, flags=flags,
        calibrates=measured,
    )  # fmt: skip


_PLAIN_WIRE = {"reduction": "annotated"}
_PLAIN = {"attention": "plain", **_PLAIN_WIRE}
ROWS: Mapping[str, Row] = {
    "ours": _ours("spmdzero"),
    "ours-wire": _ours("its wire hidden, `xla_flags`", flags=True),
    "ours-plain-attention": _ours(
        "without the attention kernel", models=_TOKENS, spmd={"attention": "plain"}
    ),
    "ours-plain-loss": _ours("without the fused loss", models=_TOKENS, loss="plain"),
    "ours-scan": _ours("with its blocks in a loop, `scan`", models=_TOKENS, spmd={"scan": "auto"}),
    "ours-annotated": _ours("its reduction annotated", spmd=_PLAIN_WIRE),
    "ours-dots": _ours(
        "with matrix products kept, the rest computed again",
        models=("gpt", "llama"),
        spmd={"recompute": "dots"},
    ),
    "ours-everything": _ours(
        "with everything computed again", models=("gpt",), spmd={"recompute": "everything"}
    ),
    "ours-nothing": _ours(
        "with nothing computed again", models=("llama",), spmd={"recompute": "nothing"}
    ),
    "ours-none": _ours(
        "without any of them", models=_TOKENS, loss="plain", spmd=_PLAIN
    ),
    "jax-plain": _jax("JAX by hand, plain"),
    "jax-splash": _jax(
        "JAX by hand, splash attention", attention="splash", loss="whole", region=True,
        models=_TOKENS,
    ),
    "jax-chunked": _jax(
        "JAX by hand, splash, chunked loss", attention="splash", loss="chunked", region=True,
        models=_TOKENS,
    ),
    "jax-scan": _jax(
        "JAX by hand, splash, chunked loss, scan, as MaxText", attention="splash", loss="chunked",
        region=True, scan=True, zero=3, recompute="all", models=_TOKENS,
    ),
    "jax-splash-flags": _jax(
        "JAX by hand, splash attention, spmdzero's flags", attention="splash", loss="whole",
        region=True, flags=True, models=_TOKENS,
    ),
    "jax-scan-flags": _jax(
        "JAX by hand, as MaxText, spmdzero's flags", attention="splash", loss="chunked",
        region=True, scan=True, zero=3, recompute="all", flags=True, models=_TOKENS,
    ),
    "jax-last": _jax(
        "JAX by hand, channels last", region=True, channels_last=True, models=("resnet",)
    ),
    "fsdpv2": Row(title="torch_xla's FSDPv2", writer="fsdpv2", options={}),
}  # fmt: skip
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
CALIBRATED = ("llama-2k", "v6e:2x4")
"""The case and the chips of `CALIBRATION`."""


def rows_of(case: str, topology: str) -> dict[str, Row]:
    """The rows of a table, by name."""
    model = CASES[case].model
    rows = {n: row for n, row in ROWS.items() if row.models is None or model in row.models}
    return rows | (CALIBRATION if (case, topology) == CALIBRATED else {})


def devices_of(topology: str) -> int:
    """Chips of a topology such as ``v5p:2x2x2``."""
    return math.prod(int(length) for length in topology.partition(":")[2].split("x"))
