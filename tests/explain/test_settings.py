"""A Trainer's config, which has "auto" where its arguments belong, is explained."""

from typing import Any

import pytest
import torch

import spmdzero
from spmdzero import SpmdZeroUsageError
from spmdzero.backend import runtime
from spmdzero.cli._settings import changes
from spmdzero.config import set_keys
from spmdzero.explain._settings import settings_of
from spmdzero.plan import Role

pytestmark = pytest.mark.backends("any")

TRAINERS = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
}


def test_the_rows_of_the_batch_are_a_micro_batch_and_each_stand_in_is_told(mesh: object) -> None:
    devices = runtime.device_count()
    settings, notes = settings_of(TRAINERS, {"x": torch.zeros(3 * devices, 4)})
    assert settings.train_micro_batch_size_per_gpu == 3
    assert settings.optimizer is not None
    assert settings.optimizer.params["lr"] == 5e-5
    assert sorted(notes) == [
        '"auto": bf16.enabled is read as its default, false (--set bf16.enabled=...)',
        '"auto": gradient_accumulation_steps is read as 1 (--set gradient_accumulation_steps=...)',
        '"auto": memory and time don\'t depend on optimizer.params.lr, '
        "scheduler.params.warmup_num_steps, optimizer.params.weight_decay",
        '"auto": train_micro_batch_size_per_gpu is read as 3, the rows of the batch on a device '
        "(--set train_micro_batch_size_per_gpu=...)",
    ]
    # What has no effect needs no words.
    assert not any("reduce_bucket_size" in note for note in notes)


def test_a_batch_size_that_is_given_stays(mesh: object) -> None:
    x = torch.zeros(8, 4)
    settings, _ = settings_of(TRAINERS | {"train_batch_size": 64}, x)
    assert (settings.train_batch_size, settings.train_micro_batch_size_per_gpu) == (64, None)


def test_without_an_optimizer_the_states_are_those_of_the_trainers_adamw(mesh: object) -> None:
    trainers = {key: value for key, value in TRAINERS.items() if key != "optimizer"}
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), Squares())
    x = torch.ones(runtime.device_count(), 64)
    found = spmdzero.explain(model, trainers, x, stages=())
    assert found.fit_at(0).plan[Role.MOMENT] == 2 * 4 * (64 * 64 + 64)
    assert "no optimizer is named: AdamW" in str(found)
    assert found.config["optimizer"] == {"type": "AdamW"}


class Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_the_command_line_sets_keys_by_their_dotted_names() -> None:
    config: dict[str, Any] = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    wanted = "bf16.enabled=true zero_optimization.stage=2 optimizer.type=Lion log_level=x=y"
    assert set_keys(config, changes(wanted.split())) == {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Lion"},
        "log_level": "x=y",
    }


def test_a_setting_that_is_none_is_refused_in_words() -> None:
    for text in ("bf16.enabled", "=1", "a..b=1"):
        with pytest.raises(SpmdZeroUsageError, match="write KEY=VALUE, such as"):
            changes([text])
    with pytest.raises(SpmdZeroUsageError, match=r"bf16 is True in the config, and holds no keys"):
        set_keys({"bf16": True}, {"bf16.enabled": True})
