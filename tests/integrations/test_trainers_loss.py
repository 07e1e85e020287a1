"""`Trainer._tr_loss` where a client's engine trains, and where none does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spmdzero.integrations import _trainer
from spmdzero.integrations._initialize import initialize_for_client
from spmdzero.integrations._trainer import SummedLoss
from tests.support.engines import config

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")


def made() -> Any:
    """An object with what is read of transformers' Trainer, which trains by no engine yet."""

    class Trainer:
        def training_step(self) -> torch.Tensor:
            return torch.ones(())

    _trainer._defer_trainers_loss(Trainer)
    trainer: Any = Trainer()
    trainer.args = SimpleNamespace(logging_nan_inf_filter=True, auto_find_batch_size=False)
    trainer.accelerator = SimpleNamespace(deepspeed_engine_wrapped=None)
    return trainer


def test_a_trainer_without_an_engine_has_what_is_set_and_nothing_before() -> None:
    trainer, loss = made(), torch.zeros(())
    assert not hasattr(trainer, "_tr_loss")
    trainer._tr_loss = loss
    trainer.training_step()
    assert trainer._tr_loss is loss
    assert trainer.args.logging_nan_inf_filter


def test_the_filter_of_losses_stays_however_many_are_computed_for_one_sum() -> None:
    trainer = made()
    engine = initialize_for_client(
        model=nn.Linear(4, 4), config=config(train_micro_batch_size_per_gpu=16)
    )[0]
    trainer.accelerator.deepspeed_engine_wrapped = SimpleNamespace(engine=engine)
    trainer._tr_loss = torch.zeros(())
    # As a subclass's step does that makes two of Trainer's.
    trainer.training_step()
    trainer.training_step()
    # Trainer's own filter would read each loss.
    assert not trainer.args.logging_nan_inf_filter
    assert isinstance(trainer._tr_loss, SummedLoss)
    assert trainer.args.logging_nan_inf_filter
