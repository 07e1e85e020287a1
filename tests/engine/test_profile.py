"""The profiler hook: a trace of the chosen steps, or an error that says why there is none."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import current

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

# Each backend's event of a program that is run, and its number: of all devices, or of each of 8.
RUN, TIMES = {
    "torch_xla": ("PjRtComputationClient::ExecuteReplicated", 1),
    "jax": ("PjRtCpuExecutable::ExecuteHelper", 8),
}[current().name]


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    return spmdzero.initialize(
        model=nn.Linear(8, 8),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )[0]


def train(engine: spmdzero.Engine, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(8, 8)).square().mean())
        engine.step()


def runs_in(folder: Path) -> float:
    """How often a program was run in the one trace under `folder`."""
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(event.get("name") == RUN for event in events) / TIMES


def test_a_trace_holds_the_chosen_steps_only(engine: spmdzero.Engine, tmp_path: Path) -> None:
    first = engine.global_steps + 2
    with spmdzero.profile(engine, steps=(first, first + 1), folder=tmp_path):
        train(engine, 5)
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert runs_in(tmp_path) == 2


def test_the_end_of_the_block_ends_the_trace(engine: spmdzero.Engine, tmp_path: Path) -> None:
    step = engine.global_steps
    with spmdzero.profile(engine, steps=range(step, step + 9), folder=tmp_path):
        train(engine, 1)
    assert runs_in(tmp_path) == 1


def test_steps_that_never_come_are_an_error(engine: spmdzero.Engine, tmp_path: Path) -> None:
    with (
        pytest.raises(spmdzero.SpmdZeroUsageError, match="before the first of them"),
        spmdzero.profile(engine, steps=(engine.global_steps + 5,), folder=tmp_path),
    ):
        train(engine, 1)


def test_steps_that_one_trace_cannot_hold_are_refused(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    train(engine, 1)
    step = engine.global_steps
    for steps, reason in (((step, step + 2), "consecutive"), ((step - 1, step), "over")):
        with (
            pytest.raises(spmdzero.SpmdZeroUsageError, match=reason),
            spmdzero.profile(engine, steps=steps, folder=tmp_path),
        ):
            pass
    now = (step,)
    second = spmdzero.profile(engine, steps=now, folder=tmp_path)
    with (
        spmdzero.profile(engine, steps=now, folder=tmp_path),
        pytest.raises(spmdzero.SpmdZeroUsageError, match="one at a time"),
        second,
    ):
        pass
