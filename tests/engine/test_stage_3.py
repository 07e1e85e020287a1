"""Stage 3: parameters rest as shards, are gathered where they are used, and let go."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.backend import arrays, current
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.inspect import StepLedgers, peak_temporary_bytes
from spmdzero.nn import linear_cross_entropy
from spmdzero.plan import Role
from tests.engine.test_trajectories import BF16, FP32, Close, assert_follows
from tests.support import engines
from tests.support.selected import outside, selected
from tests.support.trajectory import case_of, recording, run

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

WIDTH, WORDS, ROWS = 64, 128, 8
ALL = {"stage": 3, "stage3_param_persistence_threshold": 0}


class Block(nn.Module):
    def __init__(self, width: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Blocks between an embedding and a head that has its weight: `[rows, length]` -> a loss."""

    def __init__(
        self,
        *,
        blocks: int = 2,
        width: int = WIDTH,
        words: int = WORDS,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, checkpointed=checkpointed) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), x.roll(-1, 1).flatten())


def model(**how: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**how)


def batches(count: int, *, length: int = 16) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (ROWS, length), generator=draws) for _ in range(count)]


def ledgers_of(engine: spmdzero.Engine) -> StepLedgers:
    with spmdzero.record_ledgers(engine) as ledgers:
        engines.three_calls(engine, *batches(engine.gradient_accumulation_steps()))
    return ledgers


# -- numbers ---------------------------------------------------------------------------------

Ways = dict[str, tuple[dict[str, Any], dict[str, Any]]]
WAYS: Ways = {
    "fp32": ({}, {}),
    "bf16, accumulating": ({"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}, {}),
    "fp16": ({"fp16": {"enabled": True}}, {}),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}),
    "checkpointed": ({}, {"checkpointed": True}),
    "recomputed": ({"spmd": {"recompute": "everything"}}, {}),
    "two axes": ({"spmd": {"mesh": {"data": 2, "fsdp": 4}}}, {}),
    "clipped, padded": ({"gradient_clipping": 0.5}, {"width": 61}),
}


def trained(
    engine: spmdzero.Engine, call: str, *, steps: int
) -> tuple[list[float], float | torch.Tensor | None]:
    """The losses of the first steps, and the norm of the last one's gradients."""
    count = engine.gradient_accumulation_steps()
    given = batches(steps * count)
    losses = [CALLS[call](engine, *given[i * count : (i + 1) * count]).item() for i in range(steps)]
    return losses, engine.get_global_grad_norm()


CALLS = {"one call": engines.one_call, "three calls": engines.three_calls}


def in_each(ways: Ways, *, quick: set[tuple[str, str]]) -> pytest.MarkDecorator:
    """A test's ways of training, by each style of calls; those that aren't quick are slow."""
    return pytest.mark.parametrize(
        ("way", "call"),
        [
            pytest.param(way, call, marks=[pytest.mark.slow] * ((way, call) not in quick))
            for way in ways
            for call in CALLS
        ],
    )


# Each style of calls, gathered parameters in their own dtype and again for the backward, once.
QUICK = {
    ("bf16, accumulating", "one call"),
    ("checkpointed", "three calls"),
}


@in_each(WAYS, quick=QUICK)
def test_stage_3_trains_as_stage_2(way: str, call: str) -> None:
    more, how = WAYS[way]
    found = []
    for zero in ({"stage": 2}, ALL):
        engine = engines.start(model(**how), zero_optimization=zero, **more)
        found.append(trained(engine, call, steps=4))
    (two, norm), (three, norm_3) = found
    if current().name == "jax":
        # A gathered parameter has the very numbers of a whole one, and all sums have one order.
        assert (three, norm_3) == (two, norm)
        return
    # What XLA fuses around a gather may differ with torch_xla, and so the last digits of a sum: of
    # fp32 in all ways, as losses are fp32.
    bound = 2e-6 if way in ("fp32", "checkpointed", "recomputed", "two axes") else 2e-3
    assert three == pytest.approx(two, rel=bound)
    assert norm_3 == pytest.approx(norm, rel=10 * bound)


RECORDED: dict[str, Close] = {
    "z3_w2_fp32_gas1": FP32,
    "z3_w2_bf16_gas4": BF16,
    "z3_w2_fp32_groups": FP32,
    "z3_w2_bf16_offload": BF16,
}

# Those of `make test`; others there show fp32, and offloading.
FOLLOWED = ("z3_w2_bf16_gas4", "z3_w2_fp32_groups")


@pytest.fixture(scope="module")
def recorded_runs(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    names = selected(request, "name")
    return dict(zip(names, run([case_of(name) for name in names], devices=2), strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=outside(FOLLOWED, name)) for name in RECORDED]
)
def test_losses_norms_and_counters_follow_deepspeeds_stage_3(
    recorded_runs: dict[str, dict[str, Any]], name: str
) -> None:
    assert_follows(recorded_runs[name]["records"], recording(name)["records"], RECORDED[name])


# -- where parameters rest -------------------------------------------------------------------


def test_each_device_holds_an_eighth_of_every_parameter() -> None:
    engine = engines.start(model(), zero_optimization=ALL, spmd={"min_shard_elements": 1})
    engines.one_call(engine, *batches(1))
    for name, parameter in engine.module.named_parameters():
        parts = {shard.numel() for shard in arrays.local_shards(parameter)}
        assert parts == {parameter.numel() // 8}, name
    assert engine.module.embed.weight.shape == (WORDS, WIDTH)


def test_a_frozen_parameter_rests_as_a_shard_too() -> None:
    lora = model()
    for name, parameter in lora.named_parameters():
        parameter.requires_grad_("norm" in name)
    engine = engines.start(lora, zero_optimization=ALL)
    before = engine.module.embed.weight.detach().cpu()
    engines.one_call(engine, *batches(1))
    engine.eval()
    with torch.no_grad():
        engine(batches(1)[0])
    parts = {tuple(s.shape) for s in arrays.local_shards(engine.module.embed.weight)}
    assert parts == {(WORDS // 8, WIDTH)}
    assert torch.equal(engine.module.embed.weight.detach().cpu(), before)


def test_the_persistence_thresholds_keep_small_parameters_whole() -> None:
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": WORDS * WIDTH,
        # The embedding comes first, and leaves no room for more than the first block's norm.
        "stage3_model_persistence_threshold": WORDS * WIDTH + 2 * WIDTH,
    }
    engine = engines.start(model(), zero_optimization=zero)
    whole = {n for n, p in engine.module.named_parameters() if not arrays.is_split(p)}
    assert "embed.weight" in whole
    assert {"blocks.0.up.weight", "blocks.1.down.weight"}.isdisjoint(whole)


# -- the compiled program --------------------------------------------------------------------


def test_a_parameter_is_gathered_for_forward_and_for_backward_and_nothing_at_the_end() -> None:
    engine = engines.start(model(), zero_optimization=ALL)
    ledger = ledgers_of(engine).boundary
    gathers = collections.Counter(c.tensor for c in ledger.of_role("parameter"))
    weights = {n for n, p in engine.module.named_parameters() if arrays.is_split(p)}
    # The table is read by the embedding, by the head, and by the head's backward; a block's
    # weights by forward, and by backward for the gradient of its input.
    assert gathers == dict.fromkeys(weights, 2) | {"embed.weight": 3}
    assert {c.kind for c in ledger.of_role("parameter")} == {"all-gather"}
    assert ledger.activations == ()
    assert {c.tensor for c in ledger.of_role("gradient")} >= weights


class Widened(Tied):
    """Its head computes in fp32, whatever its weight is stored in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](self.embed(x)).float()
        logits = F.linear(hidden, self.head.weight.float())
        return F.cross_entropy(logits.flatten(0, 1), x.roll(-1, 1).flatten())


def test_a_cast_to_wider_numbers_comes_after_the_gather() -> None:
    torch.manual_seed(0)
    engine = engines.start(Widened(), zero_optimization=ALL, bf16={"enabled": True})
    # XLA on the CPU widens each collective, and the audit knows which of them the program widens.
    assert spmdzero.audit(engine, batches(2)).of("wide-dtype") == ()


class Cast(nn.Module):
    """Casts its weight to one dtype after the other: `[rows]` -> a number for each row of casts."""

    CASTS = (
        (torch.int64, torch.float32),
        (torch.int64, torch.float64, torch.float32),
        (torch.int32, torch.float64),
        (torch.bool, torch.float32),
        (torch.float64, torch.int64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.int64, torch.int8, torch.float32),
    )

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 300)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {"loss": (x.mean() * self.weight).square().mean()}
        for dtypes in self.CASTS:
            weight = self.weight
            for dtype in dtypes:
                weight = weight.to(dtype)
            found[str(dtypes)] = (self.weight - weight.float()).square().mean()
        return found


def test_what_is_cast_twice_has_lost_what_the_first_dtype_does_not_hold() -> None:
    torch.manual_seed(0)
    model = Cast()
    x = torch.ones(ROWS)
    expected = {name: value.item() for name, value in model(x).items()}
    found = engines.start(model, zero_optimization=ALL)(x)
    # fp32 sums of 4,096 squares in another order.
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)


class Chunked(Tied):
    """Its loss is computed from 4 of the 16 positions of a device at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.Sequential(*self.blocks)(self.embed(x))
        return linear_cross_entropy(hidden, self.head.weight, x.roll(-1, 1), chunk=4)


def test_the_chunks_of_a_loss_share_one_gathered_head() -> None:
    torch.manual_seed(0)
    engine = engines.start(Chunked(), zero_optimization=ALL, bf16={"enabled": True})
    gathers = [c.tensor for c in ledgers_of(engine).boundary.of_role("parameter")]
    # The embedding reads it too. Each chunk takes the weight as it is, and widened to fp32.
    assert gathers.count("embed.weight") == 2


def temporary_bytes(blocks: int) -> int:
    engine = engines.start(model(blocks=blocks, width=256), zero_optimization=ALL)
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        engines.one_call(engine, batches(1, length=4)[0])
    return peak_temporary_bytes(texts[0])


def test_what_is_gathered_does_not_add_up_over_the_depth() -> None:
    few, many = temporary_bytes(3), temporary_bytes(9)
    # A block's two weights are 2 MiB whole, and a quarter of one as shards of gradients. What six
    # more blocks add is of activations, and of gradients that wait for the norm as shards.
    added, whole, shards = 6, 8 * 256 * 256 * 4, 8 * 256 * 256 * 4 // 8
    assert many - few < added * (shards + whole // 8)


def test_the_program_of_a_step_that_is_not_captured_stays_the_same() -> None:
    engine = engines.start(model(), zero_optimization=ALL)
    with engine.observe(lambda graph: None):
        known = []
        for batch in batches(3):
            engines.one_call(engine, batch)
            known.append([c.step for c in engine.programs.compilations])
    # What waits for Python's collector would be a result of the second step.
    assert known[0] == known[1] == known[2]


def test_explain_counts_shards_of_parameters_and_finds_nothing() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": ALL,
    }
    found = spmdzero.explain(model(), config, batches(1)[0], stages=())
    two, three = (found.fit_at(stage).plan[Role.PARAMETER] for stage in (2, 3))
    # The norms and three of four biases are under min_shard_elements, and stay whole.
    assert two / 8 < three < two / 7
    assert found.audit.findings == ()


# -- checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "loaded"), [pytest.param(3, 3, marks=pytest.mark.slow), (2, 3), (3, 2)]
)
def test_a_checkpoint_of_one_stage_resumes_in_another(
    tmp_path: Path, saved: int, loaded: int
) -> None:
    def start(stage: int) -> spmdzero.Engine:
        zero = ALL if stage == 3 else {"stage": stage}
        return engines.start(model(), zero_optimization=zero, bf16={"enabled": True})

    first, second, third = batches(3)
    engine = start(saved)
    engines.one_call(engine, first)
    engines.one_call(engine, second)
    engine.save_checkpoint(str(tmp_path))
    expected = engines.one_call(engine, third).item()
    resumed = start(loaded)
    resumed.load_checkpoint(str(tmp_path))
    assert engines.one_call(resumed, third).item() == pytest.approx(expected, rel=2e-6)
    for name, parameter in engine.module.named_parameters():
        ours = resumed.module.get_parameter(name).detach().cpu()
        torch.testing.assert_close(ours, parameter.detach().cpu(), rtol=2**-7, atol=1e-6)


# -- refusals --------------------------------------------------------------------------------


def test_a_global_forward_takes_parameters_whole_and_is_refused() -> None:
    with pytest.raises(SpmdZeroConfigError) as caught:
        engines.start(model(), zero_optimization=ALL, spmd={"forward": "global"})
    assert str(caught.value) == (
        "spmd.forward = 'global': at stage 3 parameters are gathered where the replica region uses "
        'them. Write "region", or use stage 2.'
    )
