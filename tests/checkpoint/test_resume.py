"""A run that was stopped and resumed is, bit for bit, the run that was not."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import REPLICATED, runtime
from tests.checkpoint.runs import assert_state, batch, config, start, train, whole_state
from tests.support.engines import replays

FP16: dict[str, Any] = {"enabled": True, "hysteresis": 1}
CASES: dict[str, dict[str, Any]] = {
    "stage 2": config(2),
    "stage 2, in the middle of a step": config(2, gas=2),
    "stage 1, in the middle of a step": config(1, gas=3),
    "stage 0, in the middle of a step": config(0, gas=2),
    "bf16, in the middle of a step": config(1, gas=2, bf16={"enabled": True}),
    "fp16": config(2, fp16=FP16 | {"initial_scale_power": 40}),
    "fp16 without ZeRO": config(0, gas=2, fp16=FP16 | {"initial_scale_power": 40}),
    "two mesh axes": config(
        1, gas=2, spmd={"min_shard_elements": 64, "mesh": {"data": 2, "fsdp": 4}}
    ),
    "global forward": config(2, gas=2, spmd={"min_shard_elements": 64, "forward": "global"}),
}
# What the others show together, and rarer ways.
SLOW = {
    *("stage 2", "stage 1, in the middle of a step", "stage 0, in the middle of a step"),
    *("fp16 without ZeRO", "global forward"),
}
# In whole steps, which are replayed and not traced.
CAPTURED: dict[str, dict[str, Any]] = {
    "stage 2": config(2),
    "stage 1, two micro-batches": config(1, gas=2),
    "bf16": config(2, bf16={"enabled": True}),
    "fp16, that skips steps": config(2, fp16=FP16 | {"initial_scale_power": 34}),
}
STOP, END = 5, 8
COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps", "cur_scale")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, case in CASES.items()
    ],
)
def test_a_resumed_run_has_the_losses_and_the_state_of_one_that_never_stopped(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    engine = start(settings)
    train(engine, range(STOP))
    skipped = engine.skipped_steps
    assert engine.save_checkpoint(tmp_path, client_state={"seen": STOP}) is True
    undisturbed = train(engine, range(STOP, END))
    if "fp16" in settings:
        assert engine.skipped_steps > skipped > 0
    resumed = start(settings)
    # Something else in every state, and in the middle of a step.
    train(resumed, range(20, 21))
    torch.manual_seed(77)
    path, client_state = resumed.load_checkpoint(tmp_path)
    assert path == str(tmp_path / f"global_step{STOP // settings['gradient_accumulation_steps']}")
    assert client_state == {"seen": STOP}
    assert train(resumed, range(STOP, END)) == undisturbed
    assert_state(resumed, whole_state(engine))
    for counter in COUNTERS:
        assert getattr(resumed, counter) == getattr(engine, counter), counter
    assert resumed.get_lr() == engine.get_lr()


def train_steps(engine: spmdzero.Engine, steps: range) -> list[float]:
    count = engine.gradient_accumulation_steps()
    data = (batch(number) for number in range(steps.start * count, steps.stop * count))
    return [loss.item() for loss in [engine.train_batch(data) for _ in steps]]


# The others show stage 2 and 16 bits.
SLOW_CAPTURED = ("stage 2", "bf16")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW_CAPTURED))
        for name, case in CAPTURED.items()
    ],
)
def test_replayed_steps_go_on_from_a_checkpoint_as_if_nothing_had_happened(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    # More than the micro-batches of a kind that are traced before it is replayed.
    stop, end = 6, 12
    engine = start(settings)
    train_steps(engine, range(stop))
    assert replays(engine)
    engine.save_checkpoint(tmp_path)
    undisturbed = train_steps(engine, range(stop, end))
    after = whole_state(engine)
    # Into the engine itself, whose programs are at hand, and into one that has captured nothing.
    for resumed in (engine, start(settings)):
        resumed.load_checkpoint(tmp_path)
        assert train_steps(resumed, range(stop, end)) == undisturbed
        assert replays(resumed), resumed.capture
        assert_state(resumed, after)


def test_steps_that_were_skipped_hold_a_resumed_schedule_back_too(tmp_path: Path) -> None:
    settings = config(2, bf16={"enabled": True, "check_grad_overflow": True})

    def go_on(engine: spmdzero.Engine) -> tuple[list[float], list[float]]:
        with torch.no_grad():
            # The infinite input is in the running mean.
            running = engine.module.body[1].running
            engine.mesh.mark(running.zero_(), REPLICATED)
            runtime.sync()
        return train(engine, range(4, 7)), engine.get_lr()

    engine = start(settings)
    train(engine, range(2))
    engine.backward(engine(torch.full((16, 12), math.inf), torch.zeros(16)))
    engine.step()
    engine.save_checkpoint(tmp_path)
    undisturbed = go_on(engine)
    resumed = start(settings)
    resumed.load_checkpoint(tmp_path)
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
