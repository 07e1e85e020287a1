"""A step with a gradient that is not finite: what DeepSpeed 0.19.8 does, without reading anything.

The expected numbers are DeepSpeed's: live, `nn.Linear(4, 4)`, AdamW, WarmupLR over 10 steps to 1e-3
by a straight line, stages 1 and 2, fp32 and bf16: the skipped step leaves lr where it was.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from tests.support import engines
from tests.support.bounds import rounded
from tests.support.engines import ask_never, assert_trained_as, reads
from tests.support.selected import product_rows

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

BATCH = torch.ones(8, 4)


def start(**more: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    warm_up = {"warmup_num_steps": 10, "warmup_type": "linear"}
    usual = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": warm_up},
    }
    return engines.start(nn.Linear(4, 4), **usual | more)


def step(engine: spmdzero.Engine, factor: float) -> None:
    loss = engine(BATCH.to(next(engine.module.parameters()).dtype)).float().pow(2).mean()
    engine.backward(loss * torch.tensor(factor).to(engine.device))
    engine.step()


FACTORS = [1.0, float("nan"), 1.0, float("inf"), 1.0, 1.0]
# What each step's update ran with: the schedule's positions 0, 0 again (both at the minimum), ...
POSITIONS_AFTER = [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("bf16", "look"),
    product_rows([False, True], [True, False], quick={(False, True), (True, False)}),
)
def test_skipped_steps_hold_the_schedule_back(
    bf16: bool, look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_never(monkeypatch)
    engine = start(bf16={"enabled": bf16})
    before = reads()
    for index, factor in enumerate(FACTORS):
        step(engine, factor)
        if look:
            assert engine.get_lr() == rounded([POSITIONS_AFTER[index] * 1e-4])
            assert engine.was_step_applied() == (factor == 1.0)
            assert engine.skipped_steps == sum(f != 1.0 for f in FACTORS[: index + 1])
            if factor != 1.0:
                assert engine.get_global_grad_norm() == float("inf")
    assert (reads() > before) == look
    assert (engine.skipped_steps, engine.global_steps) == (2, 6)
    assert engine.get_lr() == rounded([3e-4])
    # A wrong lr at one step would show as 1e-4; bf16 parameters have 3 digits.
    assert_trained_as(engine, reference(), rtol=0, atol=2e-3 if bf16 else 1e-6)


def reference() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    for position in [0, 0, 1, 2]:  # the four steps that apply
        optimizer.param_groups[0]["lr"] = position * 1e-4
        optimizer.zero_grad()
        model(BATCH).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def test_a_torch_schedule_is_held_back_too() -> None:
    engine = start(scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}})
    rates = []
    for factor in FACTORS:
        step(engine, factor)
        rates += engine.get_lr()
    assert rates == [1e-3 * 0.5**n for n in (1, 1, 2, 2, 3, 4)]


def test_stage_0_in_fp32_checks_nothing_as_deepspeed() -> None:
    engine = start(zero_optimization={"stage": 0})
    step(engine, float("nan"))
    assert (engine.skipped_steps, engine.was_step_applied()) == (0, True)
    assert torch.isnan(engine.module.weight.detach().cpu()).all()


def test_bf16_can_leave_the_check_out() -> None:
    engine = start(bf16={"enabled": True, "check_grad_overflow": False})
    step(engine, float("nan"))
    assert (engine.skipped_steps, engine.was_step_applied()) == (0, True)
    assert engine.get_global_grad_norm() == float("inf")


def test_a_loss_scale_at_its_minimum_ends_the_run() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    engine = start(fp16=fp16)
    step(engine, float("inf"))
    assert (engine.cur_scale, engine.skipped_steps) == (1.0, 1)
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match="already at minimum"):
        step(engine, float("inf"))


def test_a_loss_scale_at_its_minimum_goes_on_without_zero(caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 1}
    engine = start(fp16=fp16, zero_optimization={"stage": 0})
    for _ in range(2):
        step(engine, float("inf"))
    assert (engine.cur_scale, engine.skipped_steps) == (1.0, 2)
    assert "already at minimum" in caplog.text


def test_fp16_without_zero_says_once_that_deepspeed_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="spmdzero")
    for _ in range(2):
        start(fp16={"enabled": True}, zero_optimization={"stage": 0})
    lines = [record for record in caplog.records if "DeepSpeed 0.19.8" in record.getMessage()]
    assert len(lines) == 1


def test_fp16_reads_one_scalar_a_step() -> None:
    engine = start(fp16={"enabled": True, "initial_scale_power": 4})
    for _ in range(2):
        step(engine, 1.0)
    before = reads()
    step(engine, 1.0)
    assert reads() - before <= 1


def test_a_skipped_step_leaves_one_line_at_the_next_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_never(monkeypatch)
    engine = start()
    before = reads()
    for factor in (1.0, float("nan"), 1.0):
        step(engine, factor)
    assert reads() == before
    assert not caplog.messages or "skipped" not in caplog.text
    with caplog.at_level("INFO", "spmdzero"):
        engine.get_lr()
        engine.get_lr()
        assert engine.skipped_steps == 1
    lines = [line for line in caplog.messages if "skipped" in line]
    assert lines == [
        "1 of steps 0 to 2 were skipped: the gradient was not finite, parameters and optimizer "
        "states are as they were"
    ]


def test_a_checkpoint_is_such_a_read_and_what_it_told_is_not_told_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    step(engine, float("nan"))
    engine.save_checkpoint(tmp_path)
    assert "step 0 was skipped" in caplog.text
    caplog.clear()
    other = start()
    other.load_checkpoint(tmp_path)
    assert other.skipped_steps == 1
    assert "skipped" not in caplog.text


@pytest.mark.parametrize(("scale", "level"), [({}, "INFO"), ({"loss_scale": 8}, "WARNING")])
def test_in_fp16_which_reads_each_step_one_line_names_it_at_once(
    scale: dict[str, Any], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(fp16={"enabled": True, "hysteresis": 1} | scale)
    with caplog.at_level("INFO", "spmdzero"):
        for value in (1.0, 1.0, float("inf")):
            step(engine, value)
    (line,) = [record for record in caplog.records if "skipped" in record.getMessage()]
    assert "step 2 was skipped" in line.getMessage()
    assert line.levelname == level


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_lr_that_is_a_tensor_stays_that_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    lr = torch.full(shape, 0.1)
    model = nn.Linear(4, 4)
    warm_up = {"warmup_num_steps": 4, "warmup_max_lr": 0.4, "warmup_type": "linear"}
    engine, *_ = spmdzero.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        config=engines.config(
            zero_allow_untested_optimizer=1,
            scheduler={"type": "WarmupLR", "params": warm_up},
        ),
    )
    seen = []
    for factor in (1.0, 1.0, float("nan"), 1.0):
        step(engine, factor)
        assert engine.optimizer.param_groups[0]["lr"] is lr
        seen += engine.get_lr()
    # The schedule filled it, and what it held before isn't lost to a skipped step.
    assert seen == rounded([0.0, 0.1, 0.1, 0.2])
    engine.save_checkpoint(tmp_path)
    step(engine, 1.0)
    assert float(lr) == rounded(0.3)
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == rounded(0.2)
