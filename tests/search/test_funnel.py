"""The search, by the TPU's compiler: what it finds is compiled, and its JSON trains."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import spmdzero
from spmdzero import SpmdZeroRuntimeError, SpmdZeroUsageError, TrainingPlan, plan_for
from spmdzero.explain import _passes
from tests.search.models import CONFIG, LENGTH, ROWS, WORDS, Net, tokens

pytestmark = pytest.mark.backends("jax")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def plan(cache: Path) -> TrainingPlan:
    spmdzero.backend.runtime.start()
    return plan_for(
        Net(), CONFIG, tokens(), tpu="v5e:2x4", programs=3, cache=cache, price=1.2, tokens=1e9
    )


def test_the_best_is_the_quickest_that_was_compiled(plan: TrainingPlan) -> None:
    best, yours = plan.best, plan.yours
    assert best is not None
    assert yours is not None
    fitting = [way for way in plan.ways if way.fits]
    assert len(fitting) >= 3
    times = [way.seconds or 0.0 for way in fitting]
    assert times == sorted(times)
    assert times[0] > 0
    assert yours.keys["zero_optimization.stage"] == 0
    assert yours.keys["train_micro_batch_size_per_gpu"] == ROWS // 8
    assert best.words in str(plan)
    # The proof is the compiled program of the best: its ledger, peak and time.
    proof = plan.explanation
    assert proof is not None
    assert proof.times[0].seconds == best.seconds
    assert proof.verdicts[0].peak == best.peak
    assert proof.moves_on("v5e:2x4").programs[0].ledger.wire_bytes > 0


def test_rates_and_prices_follow_from_the_time(plan: TrainingPlan) -> None:
    best = plan.best
    assert best is not None
    assert best.rate is not None
    seconds = best.seconds or 0.0
    assert best.rate == pytest.approx(ROWS * LENGTH / seconds / 8)
    assert best.per_million == pytest.approx(1.2 / 3600 / best.rate * 1e6)
    assert best.of_run == pytest.approx(1000 * best.per_million)
    assert best.run_seconds == pytest.approx(1e9 / (ROWS * LENGTH) * seconds)


def test_the_chosen_json_trains_with_the_losses_of_stage_2(
    plan: TrainingPlan, tmp_path: Path, mesh: object
) -> None:
    plan.write(tmp_path / "ds_plan.json")
    chosen = json.loads((tmp_path / "ds_plan.json").read_text())
    stage_2 = {
        **CONFIG, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": ROWS // 8
    }  # fmt: skip
    # fp32 on every device count; sums over devices are in another order.
    assert losses(chosen) == pytest.approx(losses(stage_2), rel=1e-5)


def losses(config: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(model=Net(), config=config)
    made = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
        rows = iter(batch.split(len(batch) // engine.gradient_accumulation_steps()))
        made.append(float(engine.train_batch(rows)))
    return made


def test_what_was_compiled_is_not_compiled_again(
    plan: TrainingPlan, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_one = _passes.compile_one

    def counted(program: Path) -> None:
        compiled.append(program)
        compile_one(program)

    monkeypatch.setattr(_passes, "compile_one", counted)
    again = plan_for(
        Net(), CONFIG, tokens(), tpu="v5e:2x4", programs=3, cache=cache, price=1.2, tokens=1e9
    )
    assert again.ways == plan.ways
    # Only libtpu's answer that it knows the slice.
    assert len(compiled) == 1


def test_a_plan_shows_itself(plan: TrainingPlan) -> None:
    text, html = str(plan), plan.to_html()
    assert TrainingPlan.from_json(plan.to_json()) == plan
    for said in ("Best on v5e:2x4", "The JSON to use", "ways to train", "gcloud"):
        assert said in text
        assert said in html
    assert "reduce-scatter" in html or "all-reduce" in html
    assert re.search(r"1\.\d\d times as fast|Your JSON says what is best", text)


def test_where_nothing_fits_the_smallest_larger_slice_is_named(mesh: object, cache: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(65536, 65536, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).square().mean()

    with torch.device("meta"):
        model, x = Wide(), torch.empty(8, 65536)
    config = {**CONFIG, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}
    plan = plan_for(model, config, x, tpu="v5e:2x4", programs=1, cache=cache)
    assert plan.best is None
    assert not plan.config
    # 8.6 billion parameters with 16 bytes of states are 16 GiB of each of 8 chips, and 8 of 16.
    assert plan.larger in ("v5e:4x4", "v5e:4x8")
    assert f"Something may fit {plan.larger}" in str(plan)


def test_a_model_that_no_engine_takes_is_said_once(mesh: object, cache: Path) -> None:
    class OnlyShapes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, FakeTensor):
                raise ValueError("no values, please")
            return super().forward(x).square().mean()

    x = torch.empty(8, 8, device="meta")
    with pytest.raises(SpmdZeroRuntimeError, match=r"none of the ways .*no values, please"):
        plan_for(OnlyShapes(8, 8), CONFIG, x, tpu="v5e:2x4", programs=2, cache=cache)


def test_what_can_not_be_is_refused_before_anything_is_compiled(mesh: object) -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"v5e:4x4 has 16 devices and this process 8"):
        plan_for(Net(), CONFIG, tokens(), tpu="v5e:4x4")
    with pytest.raises(SpmdZeroRuntimeError, match=r"no topology v5e:8x1x1|no topology v5e"):
        plan_for(Net(), CONFIG, tokens(), tpu="v5e:8x1x1")
    with pytest.raises(SpmdZeroUsageError, match="price=-1"):
        plan_for(Net(), CONFIG, tokens(), tpu="v5e:2x4", price=-1)
    with pytest.raises(SpmdZeroUsageError, match="no TPU topology"):
        plan_for(Net(), CONFIG, tokens(), tpu="v9:2x4")
