"""transformers' own classes, which runs without an engine use too."""

import functools
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from spmdzero.integrations._trainer import SummedLoss, _defer_trainers_loss, _tell_of_plain_torch
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


def test_a_step_that_runs_twice_leaves_the_filter_as_it_was() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.args = SimpleNamespace(logging_nan_inf_filter=True)

        def training_step(self) -> float:
            return 0.0

    _defer_trainers_loss(Trainer)
    trainer: Any = Trainer()
    vars(trainer)["_tr_loss"] = SummedLoss(lambda: None, functools.partial(int))
    # As in a subclass that calls `super().training_step` for each of two inputs.
    for _ in range(2):
        trainer.training_step()
        assert not trainer.args.logging_nan_inf_filter
    assert isinstance(trainer._tr_loss, SummedLoss)
    assert trainer.args.logging_nan_inf_filter
    assert not hasattr(Trainer(), "_tr_loss")


@pytest.mark.parametrize("named", [True, False])
def test_a_trainer_without_a_config_says_that_it_trains_by_plain_torch(
    named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class OfAClient:
        is_deepspeed_enabled = named

        def train(self, steps: int) -> int:
            return steps

    _tell_of_plain_torch(SimpleNamespace(Trainer=OfAClient))
    with caplog.at_level("WARNING", logger="spmdzero"):
        assert OfAClient().train(3) == 3
    said = [line for line in caplog.messages if "OfAClient trains by plain torch" in line]
    assert len(said) == (0 if named else 1)


@pytest.mark.slow
def test_bf16_is_allowed_where_deepspeed_is_asked_for() -> None:
    # Without a GPU, and on one without bf16, transformers refuses it for a plain run.
    run_python("-c", textwrap.dedent("""
        import spmdzero.integrations
        spmdzero.integrations.install()
        from transformers import TrainingArguments

        try:
            TrainingArguments(bf16=True)
        except ValueError as error:
            assert "bf16" in str(error)
        else:
            raise AssertionError("a plain run in bf16")
        settings = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
        assert TrainingArguments(deepspeed=settings, bf16=True).bf16
    """))  # fmt: skip
