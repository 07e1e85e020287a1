"""Skipped steps, and the schedule that they hold back, across a load: from every format to every.

The gradient of the loss is the same at each step, so that an update tells the lr that it ran with.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.formats import Conversion, convert
from tests.support import engines
from tests.support.bounds import rounded

BATCH = torch.ones(8, 4)
NAN = math.nan
# Four of these are applied.
BEFORE = [1.0, NAN, NAN, 1.0, 1.0, NAN, 1.0]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, never skips": {"zero_optimization": {"stage": 0}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "auto_cast": True}},
}


class Mean(engines.Mean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.line.weight.dtype))


def start(precision: str, *, schedule: bool = True) -> spmdzero.Engine:
    warmup = {"warmup_num_steps": 100, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    settings = {
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
    } | ({"scheduler": {"type": "WarmupLR", "params": warmup}} if schedule else {})
    return engines.start(Mean(), **settings | PRECISIONS[precision])


def step(engine: spmdzero.Engine, factor: float) -> None:
    loss = engine(BATCH)
    engine.backward(loss * torch.tensor(factor).to(engine.device))
    engine.step()


def lr_after(applied: int) -> float:
    """The schedule stands at -1 before its first step."""
    return max(applied - 1, 0) * 0.01


def bias(engine: spmdzero.Engine) -> float:
    whole = spmdzero.utils.safe_get_full_fp32_param(engine.module.line.bias)
    assert whole is not None
    return whole[0].item()


def assert_goes_on(engine: spmdzero.Engine, *, applied: int, skipped: int) -> None:
    """Trains on; each step runs with the lr that is due after so many applied steps."""
    skips = engine.optimizer.can_skip
    for factor in [1.0, 1.0, NAN, 1.0, NAN, 1.0] if skips else [1.0] * 4:
        assert engine.get_lr() == rounded([lr_after(applied)])
        before = bias(engine)
        step(engine, factor)
        applied, skipped = applied + (factor == 1), skipped + (factor != 1)
        moved = lr_after(applied - 1) / 4 if factor == 1 else 0.0
        assert before - bias(engine) == pytest.approx(moved, abs=1e-6)
        assert engine.skipped_steps == skipped
    assert engine.get_lr() == rounded([lr_after(applied)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved run: its folder, and how many of its steps were applied and skipped."""

    folder: Path
    applied: int
    skipped: int


def save(folder: Path, engine: spmdzero.Engine) -> Saved:
    for factor in BEFORE if engine.optimizer.can_skip else [1.0] * 4:
        step(engine, factor)
    engine.save_checkpoint(folder)
    return Saved(folder=folder, applied=4, skipped=3 if engine.optimizer.can_skip else 0)


def without_hold() -> spmdzero.Engine:
    """fp16 as it was saved before it had a hold, and as DeepSpeed's checkpoints have none."""
    engine = start("fp16")
    engine.optimizer.hold = None
    return engine


SOURCES: dict[str, Callable[[], spmdzero.Engine]] = {
    "fp32, owing 3 steps": lambda: start("fp32"),
    "bf16, owing 3 steps": lambda: start("bf16"),
    "fp16": lambda: start("fp16"),
    "fp16, without a hold": without_hold,
    "bf16, without a schedule": lambda: start("bf16", schedule=False),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {name: save(tmp_path_factory.mktemp("run"), make()) for name, make in SOURCES.items()}


@pytest.fixture(scope="module", params=PRECISIONS)
def engine(request: pytest.FixtureRequest) -> spmdzero.Engine:
    return start(request.param)


def test_the_schedule_goes_on_from_the_steps_that_were_applied(
    engine: spmdzero.Engine, saved: dict[str, Saved]
) -> None:
    for source, run in saved.items():
        if "schedule" not in source:
            engine.load_checkpoint(run.folder)
            assert_goes_on(engine, applied=run.applied, skipped=run.skipped)


def test_a_schedule_that_is_added_at_load_owes_nothing_for_skips_before_it(
    saved: dict[str, Saved],
) -> None:
    run = saved["bf16, without a schedule"]
    new = start("bf16")
    new.load_checkpoint(run.folder, load_lr_scheduler_states=False)
    new.optimizer.param_groups[0]["lr"] = lr_after(0)
    assert_goes_on(new, applied=0, skipped=run.skipped)


def test_a_schedule_that_stays_owes_what_it_owed(saved: dict[str, Saved]) -> None:
    own = start("bf16")
    for factor in [1.0, 1.0, NAN]:
        step(own, factor)
    own.load_checkpoint(saved["fp16"].folder, load_lr_scheduler_states=False)
    assert own.skipped_steps == 3
    assert own.optimizer.hold.owed == 1


def test_without_optimizer_states_the_loaded_schedule_owes_what_was_saved_with_it(
    engine: spmdzero.Engine, saved: dict[str, Saved]
) -> None:
    run = saved["bf16, owing 3 steps"]
    # The lr of the next position; it stays, as in DeepSpeed, and the schedule moves on from it.
    engine.optimizer.param_groups[0]["lr"] = lr_after(run.applied + 3)
    engine.load_checkpoint(run.folder, load_optimizer_states=False)
    assert_goes_on(engine, applied=run.applied, skipped=run.skipped)


def test_the_module_alone_brings_no_skips(engine: spmdzero.Engine, saved: dict[str, Saved]) -> None:
    engine.load_checkpoint(saved["fp16"].folder)
    engine.load_checkpoint(saved["fp16, without a hold"].folder, load_module_only=True)
    assert_goes_on(engine, applied=4, skipped=3)


def test_a_checkpoint_for_deepspeed_has_the_schedule_where_its_own_would_be(
    engine: spmdzero.Engine, saved: dict[str, Saved], tmp_path: Path
) -> None:
    run = saved["bf16, owing 3 steps"]
    convert(run.folder, tmp_path, Conversion(to="deepspeed", ranks=2))
    engine.load_checkpoint(tmp_path)
    assert engine.lr_scheduler.state_dict()["last_batch_iteration"] == run.applied - 1
    assert_goes_on(engine, applied=run.applied, skipped=run.skipped)
