"""A schedule that a client moves on, without asking the devices whether a step was skipped."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._initialize import initialize_for_client
from tests.support.engines import Squares, config

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")


def trained(batches: list[torch.Tensor], *, asks_after: int | None) -> tuple[Any, LambdaLR]:
    """A model after a step with each batch; the count of skipped steps is read after one."""
    torch.manual_seed(0)
    model = Squares(8)
    engine, optimizer, *_ = initialize_for_client(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config_params=config(train_micro_batch_size_per_gpu=16),
    )
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step, x in enumerate(batches):
        engine.backward(engine(x))
        engine.step()
        # What accelerate's wrapper of the optimizer says, as `_trainer` has it.
        if not optimizer.hold.stands:
            schedule.step()
        if step == asks_after:
            assert engine.skipped_steps == 1
    return [p.detach().cpu() for p in model.parameters()], schedule


@pytest.mark.parametrize("asks_after", [None, 2, 4])
def test_a_skipped_step_holds_it_back_whether_or_not_anybody_asks(asks_after: int | None) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(16, 8) for _ in range(6)]
    without, straight = trained(batches, asks_after=None)
    batches.insert(2, torch.full((16, 8), torch.inf))
    weights, schedule = trained(batches, asks_after=asks_after)
    for ours, wanted in zip(weights, without, strict=True):
        assert torch.equal(ours, wanted)
    # On the host it makes up for the step once that is known.
    assert schedule.last_epoch == straight.last_epoch + (asks_after is None)


def test_an_engine_that_only_evaluates_leaves_the_configs_schedule_out() -> None:
    # transformers takes the optimizer out of a config to evaluate at stage 3, and not the schedule.
    given = {
        "train_micro_batch_size_per_gpu": 8,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "zero_optimization": {"stage": 3},
    }
    engine, optimizer, _, schedule = initialize_for_client(model=nn.Linear(4, 3), config=given)
    assert (optimizer, schedule, engine.lr_scheduler) == (None, None, None)
    with pytest.raises(SpmdZeroUsageError, match="without an optimizer"):
        initialize_for_client(model=nn.Linear(4, 3), config=given, lr_scheduler=lambda o: o)
