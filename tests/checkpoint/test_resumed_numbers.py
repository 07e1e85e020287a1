"""A config that has changed since the checkpoint: what counts afterwards, as DeepSpeed recorded."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import spmdzero
from spmdzero._logging import forget_what_was_logged
from tests.interchange import record_resumed as recorded
from tests.interchange.record_resumed import CHANGED, SAVED

SEEN: dict[str, Any] = json.loads(recorded.OUT.read_text())
SLOW = ("z0_fp32", "z0_bf16", "z1_fp32", "z2_fp16")
# DeepSpeed sums two ranks' gradients, and here are 8 devices: another order of fp32 sums.
SUMS = 1e-5


def start(case: str, params: dict[str, Any], **more: Any) -> spmdzero.Engine:
    config = recorded.config_of(case, params, **more)
    return spmdzero.initialize(model=recorded.Model(), config=config)[0]


def step(engine: spmdzero.Engine, seed: int) -> None:
    # Each device has the rows that each of DeepSpeed's ranks had.
    engine.backward(engine(recorded.batch(seed).repeat(engine.dp_world_size, 1)))
    engine.step()


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in recorded.CASES],
)
def test_the_checkpoints_numbers_count_and_a_line_says_so(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(case, SAVED)
    step(engine, 0)
    engine.save_checkpoint(tmp_path)
    changed, expected = start(case, CHANGED, gradient_clipping=0.25), SEEN["numbers"][case]
    forget_what_was_logged()
    with caplog.at_level(logging.WARNING, "spmdzero"):
        for _ in range(2):
            changed.load_checkpoint(tmp_path)
    assert recorded.numbers(changed) == expected["loaded"]
    step(changed, 1)
    assert recorded.numbers(changed) == expected["after a step"]
    # The lr that a schedule sets is the schedule's own business.
    told = {"betas": "[0.9, 0.95]", "eps": "1e-08", "weight_decay": "0.0"}
    told |= {} if "schedule" in case else {"lr": "0.01"}
    (line,) = [r.message for r in caplog.records if "the checkpoint's numbers" in r.message]
    for key in CHANGED:
        assert (f"{key} {told.get(key)} in place of" in line) == (key in told), line


def test_a_load_of_the_same_config_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start("z1_fp32_schedule", SAVED)
    step(engine, 0)
    engine.save_checkpoint(tmp_path)
    step(engine, 0)
    with caplog.at_level(logging.WARNING, "spmdzero"):
        engine.load_checkpoint(tmp_path)
    assert "the checkpoint's numbers" not in caplog.text


def test_module_only_within_a_step_has_the_norm_that_deepspeed_has(tmp_path: Path) -> None:
    engine = start("z1_fp32", SAVED)
    step(engine, 0)
    engine.save_checkpoint(tmp_path)
    engine, expected = start("z1_fp32", SAVED, gradient_accumulation_steps=2), SEEN["module_only"]
    step(engine, 0)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    step(engine, 1)
    assert (engine.micro_steps, engine.global_steps) == (2, 1)
    assert engine.get_global_grad_norm() == pytest.approx(expected["z1_fp32"]["grad_norm"], SUMS)
