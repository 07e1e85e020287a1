"""Operations by module, counted in the compiled program, are the arithmetic ones."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.backend import counters
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect import read_matmuls
from spmdzero.profiling.flops_profiler import FlopsProfiler, ModelProfile, get_model_profile
from tests.support.contract import DIM, LAYERS, SEQ, VOCAB, make_batch, make_model

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "flops_profile.json").read_text())
DEVICES = 8
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


class Net(nn.Module):
    """One checkpointed layer before one that is not: 16 -> 64 -> 8."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self._first, x, use_reentrant=False)
        return ((self.narrow(hidden) - y) ** 2).mean()

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        # Another number each time, or XLA merges what is recomputed with what is not.
        self.calls += 1
        return torch.tanh(self.wide(x * self.calls))


def profile_of(engine: spmdzero.Engine, *batch: torch.Tensor) -> ModelProfile:
    profiler = FlopsProfiler(engine.module, engine)
    profiler.start_profile()
    engine.backward(engine(*batch))
    engine.step()
    profiler.stop_profile()
    return profiler.profile


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelProfile, str]:
    """The profile of a GPT's step on one row for each device, and the config's report."""
    file = tmp_path_factory.mktemp("profile") / "made" / "flops.txt"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": 2},
        "comms_logger": {"enabled": True},
        "flops_profiler": {
            "enabled": True, "profile_step": 1, "top_modules": 2, "output_file": str(file),
        },
    }  # fmt: skip
    engine, *_ = spmdzero.initialize(model=make_model(), config=config)
    for step in range(2):
        assert not file.exists()
        engine.backward(engine(*make_batch(step, 0)))
        engine.step()
    return profile_of(engine, *make_batch(2, 0)), file.read_text()


def test_macs_of_every_module_are_deepspeeds(gpt: tuple[ModelProfile, str]) -> None:
    assert {m.name: m.macs for m in gpt[0].modules} == RECORDED["macs"]
    assert gpt[0].params == RECORDED["params"]


def test_a_step_costs_six_operations_for_each_weight_and_token_and_the_attention(
    gpt: tuple[ModelProfile, str],
) -> None:
    weights = LAYERS * 12 * DIM * DIM + VOCAB * DIM
    attention = LAYERS * 2 * SEQ * SEQ * DIM
    profile, _ = gpt
    assert profile.flops == 2 * (weights * SEQ + attention)
    assert profile.flops + 2 * profile.other_macs == 6 * (weights * SEQ + attention)


def test_the_report_of_the_config_names_its_step_and_its_top_modules(
    gpt: tuple[ModelProfile, str],
) -> None:
    profile, report = gpt
    lines = report.splitlines()
    assert any(line.split() == ["profile", "step:", "2"] for line in lines)
    assert any(line.split() == ["data", "parallel", "size:", "8"] for line in lines)
    assert f"{profile.macs / 1e6:.2f} MMACs" in report
    depth_one = lines[lines.index("depth 1:") + 2]
    assert list(json.loads(depth_one.split(" - ")[1].replace("'", '"'))) == ["ModuleList", "Linear"]
    row = next(line.split() for line in lines if line.lstrip().startswith("h.1.mlp.c_fc "))
    assert row[1:] == ["Linear", "16,640", "14.04", "524,288", "14.29"]


def test_recomputation_is_a_cost_of_backward_and_not_of_the_module() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW}
    engine, *_ = spmdzero.initialize(model=Net(), config=config)
    profile = profile_of(engine, torch.randn(4 * DEVICES, 16), torch.randn(4 * DEVICES, 8))
    wide, narrow = 4 * 16 * 64, 4 * 64 * 8
    assert {m.name: m.macs for m in profile.modules} == {
        "": wide + narrow, "wide": wide, "narrow": narrow,
    }  # fmt: skip
    # Of both the weight's gradient, of `narrow` also its input's, and `wide` once more.
    assert profile.other_macs == 2 * wide + 2 * narrow


def test_observing_leaves_the_modules_and_the_program_alone() -> None:
    # A step that is observed is traced; here the others are too, so that they can be compared.
    traced = {"spmd": {"capture": False}}
    engine, *_ = spmdzero.initialize(
        model=nn.Linear(16, 4),
        config={"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW} | traced,
    )
    x = torch.randn(4 * DEVICES, 16)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    profiler = FlopsProfiler(engine.module, engine)
    profiler.start_profile()
    step()
    assert profiler.get_total_macs() == 4 * 16 * 4
    assert profiler.get_total_macs(as_string=True) == "256 MACs"
    assert profiler.get_total_params() == 16 * 4 + 4
    profiler.end_profile()
    compiled = counters.compiled()[0]
    step()
    assert counters.compiled()[0] == compiled
    with pytest.raises(SpmdZeroUsageError, match="start_profile"):
        profiler.get_total_flops()


def test_a_forward_alone_is_profiled_without_an_engine_and_without_moving_the_model() -> None:
    model = make_model()
    x, y = make_batch(0, 0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        flops, macs, params = get_model_profile(model, args=(x[:1], y[:1]), as_string=False)
    assert macs == RECORDED["macs"][""]
    assert (flops, params) == (2 * macs, RECORDED["params"])
    assert "Detailed Profile" in printed.getvalue()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_convolution_and_a_shape_alone_are_counted() -> None:
    model = nn.Conv2d(3, 8, kernel_size=3)
    totals = get_model_profile(model, (2, 3, 10, 10), print_profile=False)
    macs = 2 * 8 * 8 * 8 * 3 * 3 * 3
    assert totals == (f"{2 * macs / 1e3:.2f} K", f"{macs / 1e3:.2f} KMACs", "224")


def test_a_loop_counts_as_often_as_it_runs() -> None:
    hlo = """HloModule loop, num_partitions=1

%body (p: (f32[4,4])) -> (f32[4,4]) {
  %p = (f32[4,4]{1,0}) parameter(0)
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=0
  %d = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (f32[4,4]{1,0}) tuple(%d)
}

%condition (q: (f32[4,4])) -> pred[] {
  %q = (f32[4,4]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: f32[4,4]) -> (f32[4,4]) {
  %a = f32[4,4]{1,0} parameter(0)
  %i = (f32[4,4]{1,0}) tuple(%a)
  ROOT %w = (f32[4,4]{1,0}) while(%i), condition=%condition, body=%body, TRIPS
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')
    (matmul,) = read_matmuls(hlo)
    assert matmul.macs == 5 * 4 * 4 * 4


def test_what_can_not_be_profiled_says_what_to_do() -> None:
    with pytest.raises(SpmdZeroUsageError, match="get_model_profile"):
        FlopsProfiler(nn.Linear(2, 2))
    with pytest.raises(SpmdZeroUsageError, match="input_shape"):
        get_model_profile(nn.Linear(2, 2))
    with pytest.raises(SpmdZeroUsageError, match="generate"):
        get_model_profile(nn.Linear(2, 2), (2, 2), mode="generate")


# Module, shape of its input, multiply-accumulates by the formula.
CONVOLUTIONS = {
    "one output position": (nn.Conv2d(16, 12, 5), (8, 16, 5, 5), 8 * 12 * 16 * 25),
    "one dim, one position": (nn.Conv1d(16, 16, 3), (8, 16, 3), 8 * 16 * 48),
    "before a linear layer": (
        nn.Sequential(nn.Conv2d(16, 12, 5), nn.Flatten(), nn.Linear(12, 10)),
        (8, 16, 5, 5),
        8 * (12 * 400 + 120),
    ),
    "strided and transposed": (
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        (8, 16, 4, 4),
        8 * 16 * 16 * 8 * 4,
    ),
    "strided": (nn.Conv2d(3, 8, 4, stride=4), (8, 3, 8, 8), 8 * 8 * 3 * 16 * 4),
    "depthwise": (nn.Conv2d(16, 16, 3, groups=16), (8, 16, 8, 8), 8 * 16 * 9 * 36),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_counts_each_product_of_its_elements_once(name: str) -> None:
    model, shape, expected = CONVOLUTIONS[name]
    _, macs, _ = get_model_profile(model, shape, print_profile=False, as_string=False)
    assert macs == expected
