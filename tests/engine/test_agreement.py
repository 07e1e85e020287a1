"""Integers that have to be the same on all devices: read seldom, missed never."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.engine._step_end import EVERY, AgreementRhythm
from tests.support.engines import one_call, reads, replays, start, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

SAME = torch.ones(8, 4)
# The devices count different numbers of positive rows.
DIFFERENT = torch.linspace(-1, 1, 8)[:, None].expand(8, 4).contiguous()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("positive", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.positive += (x > 0).sum().to(torch.int32)
        return self.line(x).mean()


def test_the_rhythm_is_powers_of_two_and_then_a_fixed_number() -> None:
    rhythm = AgreementRhythm()
    due = [number for number in range(1, 3 * EVERY + 1) if rhythm.is_due()]
    assert due == [1, 2, 4, 8, 16, 32, EVERY, 2 * EVERY, 3 * EVERY]


@pytest.mark.parametrize(
    ("run", "more"),
    [
        pytest.param(three_calls, {}, id="folded", marks=pytest.mark.backends("jax")),
        pytest.param(three_calls, {"spmd": {"capture": False}}, id="traced"),
        pytest.param(one_call, {}, id="captured"),
    ],
)
def test_a_late_disagreement_is_found_and_few_values_are_read(run: Any, more: Any) -> None:
    engine = start(Counting(), **more)
    for _ in range(EVERY):
        run(engine, SAME)
    before = reads()
    for _ in range(EVERY // 2):
        run(engine, SAME)
    run(engine, DIFFERENT)
    for _ in range(EVERY // 2 - 2):
        run(engine, SAME)
    assert reads() == before
    assert engine.global_steps == 2 * EVERY - 1
    with pytest.raises(spmdzero.ReplicaRegionError, match="differs between replicas"):
        run(engine, SAME)
    assert (engine.global_steps, engine.micro_losses) == (2 * EVERY, ())
    assert engine.was_step_applied()
    run(engine, SAME)
    assert replays(engine) or more


def test_a_disagreement_is_found_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    engine = start(Counting())
    three_calls(engine, SAME, SAME, DIFFERENT)
    with pytest.raises(spmdzero.ReplicaRegionError, match="positive"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path)
