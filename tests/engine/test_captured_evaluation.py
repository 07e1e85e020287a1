"""Forwards without gradients: their Python runs until three of a kind were the same."""

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import counters
from spmdzero.errors import OutOfRangeError
from tests.engine.captured import (
    Residual,
    assert_twins_agree,
    batches,
    captured,
    make_engine,
    three_calls,
    twins,
)

pytestmark = pytest.mark.backends("jax")

# Number of forwards whose Python has run, which no watch sees.
RUNS: list[int] = []


class Counted(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(x.shape[0])
        return super().forward(x)


@pytest.fixture(autouse=True)
def _no_runs() -> None:
    RUNS.clear()


def evaluate(engine: spmdzero.Engine, count: int, *, train: bool = False) -> list[float]:
    """The losses of so many batches in evaluation mode, or in that of training."""
    engine.train(train)
    with torch.no_grad():
        losses = [engine(x).item() for (x,) in batches(count, first=50)]
    engine.train()
    return losses


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_they_are_those_that_are_traced_and_run_no_python(train: bool) -> None:
    """In the mode of training they drop other elements each time, and write a norm's buffers."""
    engines = twins(Counted)
    assert_twins_agree(engines, lambda engine: evaluate(engine, 8, train=train))
    RUNS.clear()
    compiled = counters.compiled()[0]
    evaluate(engines[1], 4, train=train)
    assert not RUNS
    assert counters.compiled()[0] == compiled


def test_an_evaluation_between_steps_leaves_their_programs() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        return [
            loss
            for step in range(8)
            for loss in [*three_calls(engine, 1, first=step), *evaluate(engine, 2)]
        ]

    engines = twins(Counted)
    assert_twins_agree(engines, run)
    RUNS.clear()
    run(engines[1])
    assert not RUNS


def test_they_follow_weights_and_changes_of_the_module() -> None:
    engine = captured(make_engine(Counted(dropout=0.0)))
    before = evaluate(engine, 5)
    with torch.no_grad():
        engine.module.blocks[0][4].weight.zero_()
        engine.module.blocks[0][4].bias.zero_()
    weights = evaluate(engine, 5)
    assert all(a != b for a, b in zip(before, weights, strict=True))
    engine.module.blocks[1] = nn.Identity()
    assert all(a != b for a, b in zip(weights, evaluate(engine, 5), strict=True))


class Reads(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        wide = not self.training and self.norm.weight.sum().item() > 1
        return loss * 2 if wide else loss


def test_a_forward_that_reads_a_value_is_traced_at_each_step() -> None:
    engines = twins(Reads)
    assert_twins_agree(engines, lambda engine: evaluate(engine, 6))


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).mean()


def test_an_index_outside_of_its_range_is_found_without_python() -> None:
    engine = make_engine(Embeds())
    ids = torch.zeros(16, 2, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(5):
            engine(ids)
        engine(ids + 8)
    with pytest.raises(OutOfRangeError):
        engine.save_checkpoint("/nowhere")


def test_outputs_that_are_read_later_are_those_of_their_forward() -> None:
    engine = make_engine(Counted(dropout=0.0))
    engine.eval()
    with torch.no_grad():
        kept = [engine(x) for (x,) in batches(6)]
        expected = [engine(x).item() for (x,) in batches(6)]
    assert [loss.item() for loss in kept] == expected


def test_inference_mode_makes_tensors_of_its_own() -> None:
    engine = make_engine(Counted(dropout=0.0))
    expected = evaluate(engine, 5)
    engine.eval()
    with torch.inference_mode():
        losses = [engine(x) for (x,) in batches(5, first=50)]
    assert all(loss.is_inference() for loss in losses)
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-6)
