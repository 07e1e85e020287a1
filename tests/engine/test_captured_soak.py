"""Two thousand replayed steps: nothing compiled, nothing kept."""

import gc
import resource
from pathlib import Path

import pytest
import torch

from spmdzero.backend import counters, runtime
from tests.engine.captured import batches, captured, make_engine

pytestmark = pytest.mark.backends("jax")


@pytest.mark.slow
def test_two_thousand_replayed_steps_compile_nothing_and_keep_no_memory() -> None:
    engine = captured(make_engine())
    compiled, traced = counters.compiled()[0], engine.capture.traced
    (batch,) = batches(1)
    for step in range(2000):
        loss = engine.train_batch(iter([batch]))
        if step == 200:
            runtime.wait()
            gc.collect()
            before = resident()
    assert torch.isfinite(loss.cpu())
    assert counters.compiled()[0] == compiled
    assert engine.capture.traced == traced
    runtime.wait()
    gc.collect()
    # One copy of the state, kept at each step, would be 1800 x 30 kB.
    assert resident() - before < 20e6


def resident() -> int:
    """Bytes that the process has in memory now; its peak may be that of an earlier test."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
