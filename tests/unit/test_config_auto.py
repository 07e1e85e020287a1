"""What "auto" becomes: Hugging Face's value, DeepSpeed's default, or an error that names it."""

import dataclasses
import logging
from pathlib import Path

import pytest
from transformers import TrainingArguments

from spmdzero.config import load_config, resolve_batch_sizes
from spmdzero.config._models import SECTIONS
from spmdzero.errors import SpmdZeroConfigError
from tests.support.refusals import differing, nested, refused

pytestmark = pytest.mark.backends("any")

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def test_auto_in_a_section_is_the_default():
    config = load_config(
        {
            "fp16": {"enabled": "auto", "loss_scale": "auto"},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
            "gradient_clipping": "auto",
        }
    )
    assert not config.fp16.enabled
    assert not config.bf16.enabled
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.gradient_clipping == 1.0


def test_auto_turns_nothing_on_that_is_refused():
    auto = {"device": "auto", "pin_memory": "auto"}
    load_config(
        {"zero_optimization": {"offload_optimizer": auto}, "amp": {"enabled": "auto"}},
    )


def test_auto_is_logged_with_what_it_became(caplog):
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        load_config(
            {
                "gradient_clipping": "auto",
                "optimizer": {"type": "Adam", "params": {"weight_decay": "auto"}},
            }
        )
    (line,) = [record.message for record in caplog.records]
    assert line == (
        'config keys that are "auto" are read: optimizer.params.weight_decay as 0.0, '
        "gradient_clipping as its default, 1.0"
    )


def test_the_source_keeps_auto():
    given = {"gradient_clipping": "auto", "optimizer": {"type": "Adam", "params": {"eps": "auto"}}}
    assert load_config(given).source == given


def test_auto_of_the_optimizer_is_the_default_of_training_arguments():
    # With torch_adam, AdamW's own default of the decay is 0.01.
    params = {"betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    config = load_config({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3} | params}})
    trainer = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert config.optimizer.params == {
        "lr": 1e-3,
        "betas": [trainer["adam_beta1"], trainer["adam_beta2"]],
        "eps": trainer["adam_epsilon"],
        "weight_decay": trainer["weight_decay"],
        "torch_adam": True,
    }


def test_auto_of_another_optimizer_parameter_is_its_default():
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": "auto"}}
    assert load_config({"optimizer": optimizer}).optimizer.params == {"lr": 0.1}


def test_auto_learning_rates_of_the_warmup_are_zero_and_the_optimizers():
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "total_num_steps": 9}
    config = load_config(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
            "scheduler": {"type": "WarmupDecayLR", "params": params},
        }
    )
    assert config.scheduler.params["warmup_min_lr"] == 0.0
    assert config.scheduler.params["warmup_max_lr"] == 3e-4


def test_auto_peak_of_the_warmup_without_an_optimizer_is_the_client_optimizers():
    params = {"warmup_max_lr": "auto", "total_num_steps": 9}
    config = load_config({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert config.scheduler.params["warmup_max_lr"] is None


def test_auto_that_only_the_user_knows_is_refused_by_name():
    schedules = {"WarmupLR": "warmup_num_steps", "WarmupDecayLR": "total_num_steps"}
    rows = [
        ({"scheduler": {"type": type_, "params": {name: "auto"}}}, f"scheduler.params.{name}")
        for type_, name in schedules.items()
    ]
    rows += [({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr")]
    assert differing([(config, key, "nothing here tells") for config, key in rows]) == []


def test_auto_is_refused_where_no_default_exists():
    betas = {"type": "AdamW", "params": {"betas": [0.9, "auto"]}}
    rows = [(nested(key, "auto"), key, "auto") for key in ("optimizer.type", "scheduler.type")]
    assert differing([*rows, ({"optimizer": betas}, "optimizer.params.betas", "auto")]) == []


def test_a_section_that_is_auto_is_refused_for_every_section():
    for path in set(SECTIONS) - {""}:
        assert refused(nested(path, "auto")).key == path


def test_auto_is_a_value_of_reduction():
    assert load_config({"spmd": {"reduction": "auto"}}).spmd.reduction == "auto"


def test_an_auto_batch_size_follows_from_the_others():
    config = load_config(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": "auto",
        }
    )
    sizes = resolve_batch_sizes(config, dp_world_size=8)
    assert (sizes.train, sizes.micro, sizes.accumulation) == (16, 2, 1)


def test_auto_batch_sizes_that_nothing_determines_are_named():
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    with pytest.raises(SpmdZeroConfigError) as caught:
        resolve_batch_sizes(load_config(auto), dp_world_size=8)
    assert (caught.value.key, caught.value.value) == ("train_batch_size", "auto")
    assert "train_micro_batch_size_per_gpu" in caught.value.reason


def test_the_guides_file_names_the_learning_rate_without_the_trainer():
    assert refused(CONFIGS / "hf_zero2_auto.json").key == "optimizer.params.lr"


def test_the_guides_file_loads_when_the_trainer_has_filled_it():
    config = load_config(CONFIGS / "hf_zero2_filled.json")
    assert config.bf16.enabled
    assert not config.fp16.enabled
    assert config.optimizer.params["lr"] == config.scheduler.params["warmup_max_lr"] == 2e-5
    assert config.scheduler.params["total_num_steps"] == 100
    sizes = resolve_batch_sizes(config, dp_world_size=1)
    assert (sizes.train, sizes.micro, sizes.accumulation) == (8, 4, 2)
