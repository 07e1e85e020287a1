"""MFU is of the model's own arithmetic, however its step is written; HFU of all that runs."""

import functools
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero import Explanation
from spmdzero.explain import FirstStep, StepTime, Topology
from spmdzero.nn import linear_cross_entropy

pytestmark = [
    pytest.mark.backends("jax"),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"),
]

WIDTH, HEADS, LENGTH, WORDS, BLOCKS, ROWS, TPU = 64, 2, 128, 256, 4, 2, "v5e:2x4"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + seen.transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, *, fused: bool = False, unknown: bool = False) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.fused, self.unknown = fused, unknown

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        if self.unknown:
            x = x + torch.linalg.matrix_norm(torch.linalg.inv(self.head.weight[:8, :8].float()))
        if self.fused:
            return linear_cross_entropy(x, self.head.weight, tokens)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


# Three forwards of the weights, and of half of attention's pairs, of a device's rows.
WEIGHTS = BLOCKS * (3 + 4 + 4) * WIDTH**2 + WIDTH * WORDS
PAIRS = BLOCKS * ROWS * HEADS * LENGTH**2 / 2
FLOPS = 3 * (2 * ROWS * LENGTH * WEIGHTS + 2 * 2 * PAIRS * WIDTH / HEADS)


@functools.cache
def explained(stage: int = 2, accumulation: int = 1, **changes: Any) -> Explanation:
    model = {name: changes.pop(name) for name in ("fused", "unknown") if name in changes}
    with torch.device("meta"):
        net = Net(**model)
    mesh = dict(changes.get("mesh", (("fsdp", -1),)))
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "spmd": {"xla_flags": "none", **changes, "mesh": mesh},
    }
    rows = torch.zeros(8 // mesh.get("sequence", 1) * ROWS, LENGTH, dtype=torch.long)
    return spmdzero.explain(net, config, rows, tpu=[TPU], stages=())


def time(*args: Any, **changes: Any) -> StepTime:
    return explained(*args, **changes).time_on(TPU)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": "everything"},
        {"scan": "on"},
        {"stage": 3, "scan": "on", "recompute": "everything"},
        {"attention": "plain"},
        pytest.param({"attention": "kernel"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "dots"}, marks=pytest.mark.slow),
        pytest.param({"stage": 3}, marks=pytest.mark.slow),
        pytest.param({"fused": True}, marks=pytest.mark.slow),
        pytest.param({"forward": "global", "attention": "plain"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_models_arithmetic_is_the_same_however_the_step_is_written(changes: Any) -> None:
    assert time(**changes).model_flops == FLOPS
    assert time(**changes).not_counted == ()


def test_hfu_has_what_is_computed_again_and_mfu_only_the_time_that_it_takes() -> None:
    once, twice = time(), time(recompute="everything")
    for each in (once, twice):
        assert each.hfu == pytest.approx(each.flops / each.seconds / each.peak_flops)
        assert each.mfu == pytest.approx(FLOPS / each.seconds / each.peak_flops)
    # A block's forward, but for its last product, of whose result nothing needs the value.
    again = 2 * ROWS * LENGTH * BLOCKS * (3 + 4) * WIDTH**2
    assert again <= twice.flops - once.flops <= FLOPS / 3
    assert twice.seconds > once.seconds
    assert (twice.mfu or 1.0) < (once.mfu or 0.0)


def test_a_steps_arithmetic_is_that_of_all_its_micro_batches() -> None:
    assert time(accumulation=3).model_flops == 3 * FLOPS


@pytest.mark.slow
def test_devices_that_share_rows_have_a_part_each() -> None:
    mesh = (("fsdp", -1), ("sequence", 2))
    assert time(mesh=mesh).model_flops == FLOPS / 2


def test_both_are_shown_by_their_names_in_words_in_html_and_in_json() -> None:
    found = explained(recompute="everything")
    each = found.time_on(TPU)
    assert each.mfu is not None
    said = f"MFU {100 * each.mfu:.1f} %, HFU {100 * each.hfu:.1f} % of the chip's peak"
    assert said in str(found).splitlines()[0]
    for shown in (str(found).partition("5. How long")[2], found.to_html(), each._repr_html_()):
        assert said in shown.replace("&#x27;", "'")
    assert Explanation.from_json(found.to_json()).time_on(TPU) == each


def test_a_model_with_an_operation_that_is_not_known_has_no_mfu_and_says_why() -> None:
    found = explained(unknown=True)
    each = found.time_on(TPU)
    assert (each.mfu, each.model_flops) == (None, None)
    assert each.hfu > 0
    assert "MFU not counted, HFU" in str(found).splitlines()[0]
    assert "how much arithmetic aten.linalg_inv_ex.default is isn't known" in str(found)


class _StepEndedError(BaseException):
    pass


@pytest.mark.slow
def test_a_scripts_own_loss_and_another_engine_count_as_they_run() -> None:
    def ended(_: FirstStep) -> None:
        raise _StepEndedError

    def layer(outer: int) -> nn.Linear:
        return nn.Linear(WIDTH, outer, bias=False)

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }

    def script() -> None:
        engine, *_ = spmdzero.initialize(model=layer(LENGTH), config=config)
        other, *_ = spmdzero.initialize(
            model=layer(LENGTH), config={"train_micro_batch_size_per_gpu": ROWS}
        )
        head = torch.ones(LENGTH, WORDS, device=engine.device)
        while True:
            x = torch.ones(8 * ROWS, WIDTH)
            with torch.no_grad():
                known = other(x)
            engine.backward(((engine(x) - known) @ head).square().mean())
            engine.step()

    step = FirstStep(Topology.parse(TPU), ended=ended)
    with step.watched(), pytest.raises(_StepEndedError):
        script()
    # The input is data, the other model has no backward, the head is not trained.
    first, last = 2 * ROWS * WIDTH * LENGTH, 2 * ROWS * LENGTH * WORDS
    found = step.explanation().time_on(TPU)
    assert found.model_flops == 2 * (2 * first + first + 2 * last)
