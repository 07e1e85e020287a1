"""Saving and resuming between steps that are replayed, not traced."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from tests.checkpoint.runs import batch, config, start, whole_state

# More than the micro-batches of a kind that are traced before it is replayed.
STOP, END = 6, 12

CASES: dict[str, dict[str, Any]] = {
    "stage 2": config(2),
    "stage 1, two micro-batches": config(1, gas=2),
    "bf16": config(2, bf16={"enabled": True}),
    "fp16, that skips steps": config(
        2, fp16={"enabled": True, "initial_scale_power": 34, "hysteresis": 1}
    ),
}


def train(engine: spmdzero.Engine, steps: range) -> list[float]:
    count = engine.gradient_accumulation_steps()

    def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from (batch(number) for number in range(steps.start * count, steps.stop * count))

    source = data()
    return [loss.item() for loss in [engine.train_batch(source) for _ in steps]]


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_replayed_steps_go_on_from_a_checkpoint_as_if_nothing_had_happened(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    engine = start(settings)
    train(engine, range(STOP))
    assert engine.capture.replayed
    engine.save_checkpoint(tmp_path)
    undisturbed = train(engine, range(STOP, END))
    after = whole_state(engine)

    # Into the engine itself, whose programs are at hand, and into one that has captured nothing.
    for resumed in (engine, start(settings)):
        resumed.load_checkpoint(tmp_path)
        replayed = resumed.capture.replayed
        assert train(resumed, range(STOP, END)) == undisturbed
        assert resumed.capture.replayed > replayed, resumed.capture
        for name, tensor in whole_state(resumed).items():
            assert torch.equal(tensor, after[name]), name


def test_a_load_leaves_the_captured_programs_in_use(tmp_path: Path) -> None:
    engine = start(config(2))
    train(engine, range(STOP))
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    train(engine, range(STOP, STOP + 1))
    assert engine.capture.reason is None, engine.capture
