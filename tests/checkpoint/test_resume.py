"""A run that was stopped and resumed is, bit for bit, the run that was not."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend.torch_xla import runtime
from tests.checkpoint.runs import batch, config, start, train, whole_state

CASES: dict[str, dict[str, Any]] = {
    "stage 2": config(2),
    "stage 2, in the middle of a step": config(2, gas=2, spmd={"min_shard_elements": 64}),
    "stage 1, in the middle of a step": config(1, gas=3),
    "stage 0, in the middle of a step": config(0, gas=2),
    "bf16, in the middle of a step": config(1, gas=2, bf16={"enabled": True}),
    "fp16": config(2, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1}),
    "two mesh axes": config(
        1, gas=2, spmd={"min_shard_elements": 64, "mesh": {"data": 2, "fsdp": 4}}
    ),
    "global forward": config(2, gas=2, spmd={"min_shard_elements": 64, "forward": "global"}),
}
STOP, END = 5, 8


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_resumed_run_has_the_losses_and_the_state_of_one_that_never_stopped(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    engine = start(settings)
    train(engine, range(STOP))
    assert engine.save_checkpoint(tmp_path, client_state={"seen": STOP}) is True
    undisturbed = train(engine, range(STOP, END))
    after = whole_state(engine)

    resumed = start(settings)
    # Something else in every state, and in the middle of a step.
    train(resumed, range(20, 21))
    torch.manual_seed(77)
    path, client_state = resumed.load_checkpoint(tmp_path)
    assert path == str(tmp_path / f"global_step{STOP // settings['gradient_accumulation_steps']}")
    assert client_state == {"seen": STOP}
    assert train(resumed, range(STOP, END)) == undisturbed
    for name, tensor in whole_state(resumed).items():
        assert torch.equal(tensor, after[name]), name
    for counter in ("global_steps", "micro_steps", "global_samples", "skipped_steps", "cur_scale"):
        assert getattr(resumed, counter) == getattr(engine, counter), counter
    assert resumed.get_lr() == engine.get_lr()


def test_the_fp16_case_above_has_skipped_steps_before_and_after_it_stops() -> None:
    engine = start(CASES["fp16"])
    train(engine, range(STOP))
    before = engine.skipped_steps
    assert before > 0
    train(engine, range(STOP, END))
    assert engine.skipped_steps > before


def test_steps_that_were_skipped_hold_a_resumed_schedule_back_too(tmp_path: Path) -> None:
    settings = config(2, bf16={"enabled": True, "check_grad_overflow": True})

    def go_on(engine: spmdzero.Engine) -> tuple[list[float], list[float]]:
        return train(engine, range(4, 7)), engine.get_lr()

    engine = start(settings)
    train(engine, range(2))
    x = torch.full((16, 12), math.inf)
    loss = engine(x, torch.zeros(16))
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(tmp_path)
    with torch.no_grad():
        # The infinite input is in the running mean.
        engine.module.body[1].running.zero_()
        engine.mesh.mark(engine.module.body[1].running)
        runtime.sync()
    undisturbed = go_on(engine)
    resumed = start(settings)
    resumed.load_checkpoint(tmp_path)
    with torch.no_grad():
        resumed.module.body[1].running.zero_()
        resumed.mesh.mark(resumed.module.body[1].running)
        runtime.sync()
    assert go_on(resumed) == undisturbed
    assert resumed.skipped_steps == engine.skipped_steps == 1


def test_a_step_of_other_length_does_not_continue_in_its_middle(tmp_path: Path) -> None:
    engine = start(config(2, gas=2))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    with pytest.raises(spmdzero.SpmdZeroCheckpointError, match=r"2 micro-batches.* 3"):
        start(config(2, gas=3)).load_checkpoint(tmp_path)


def test_gradients_that_wait_for_their_step_are_not_dropped_silently(tmp_path: Path) -> None:
    engine = start(config(2))
    engine.backward(engine(*batch(0)))
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"call step\(\) first"):
        engine.save_checkpoint(tmp_path)
    engine.step()
    assert engine.save_checkpoint(tmp_path)
