"""`check_config`: every key of a config is honoured, without effect or refused, all at once."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from spmdzero.config import check_config, load_config
from spmdzero.config._must_be_off import OFF_ONLY, OffSection
from spmdzero.errors import SpmdZeroConfigError

FILES = sorted((Path(__file__).parents[1] / "data" / "configs").glob("*.json"))
BASE = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def refused(config: dict[str, Any]) -> list[str]:
    return [found.key for found in check_config(config).refused]


def with_key(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    *sections, name = key.split(".")
    holder = changed
    for section in sections:
        holder = holder.setdefault(section, {})
    holder[name] = value
    return changed


def test_all_refusals_are_found_at_once() -> None:
    config = {
        "train_batch_size": "8",
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 4, "offload_param": {"device": "nvme"}, "stagee": 1},
        "fp16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    assert sorted(refused(config)) == [
        "optimizer.type",
        "train_batch_size",
        "zero_optimization.offload_param.device",
        "zero_optimization.stage",
        "zero_optimization.stagee",
    ]


def test_what_follows_from_a_refusal_alone_is_none() -> None:
    # Without its type an optimizer is incomplete, and without ZeRO it has no such master weights.
    assert refused({**BASE, "optimizer": {"type": "OneBitAdam"}}) == ["optimizer.type"]
    low = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    masters = {**BASE, "bf16": {"enabled": True, **low}}
    assert refused({**masters, "zero_optimization": {"stage": 4}}) == ["zero_optimization.stage"]
    assert "bf16.bf16_master_weights_and_grads" in refused(masters)


def test_a_key_that_deepspeed_does_not_know_is_without_effect_and_noted() -> None:
    found = check_config({**BASE, "gradient_cliping": 1.0})
    assert found.refused == ()
    assert found.without_effect == {
        "gradient_cliping": "DeepSpeed doesn't know this key and ignores it"
    }
    (note,) = found.notes
    assert "Did you mean 'gradient_clipping'?" in note


def test_a_config_without_rows_is_refused_and_one_with_auto_is_not() -> None:
    assert refused({"bf16": {"enabled": True}}) == ["train_batch_size"]
    assert refused({"train_batch_size": "auto"}) == []


@pytest.mark.parametrize("key", OFF_ONLY)
def test_the_line_that_a_refusal_names_is_accepted_in_its_place(key: str) -> None:
    rule = OFF_ONLY[key]
    asked: Any = "something"
    at = key
    if isinstance(rule, OffSection):
        at = f"{key}.{next(iter(rule.off))}"
    (found,) = check_config(with_key(BASE, at, asked)).refused
    assert found.key == at
    mended = copy.deepcopy(BASE)
    if found.line:
        section = key.rpartition(".")[0]
        for name, value in json.loads(f"{{{found.line}}}").items():
            mended = with_key(mended, f"{section}.{name}".lstrip("."), value)
    assert refused(mended) == []
    load_config(mended)


def test_auto_is_accepted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
    }
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        found = check_config(config)
    assert found.refused == ()
    assert found.auto == {
        "train_micro_batch_size_per_gpu": "its default",
        "optimizer.params.lr": "5e-05",
        "optimizer.params.betas": "[0.9, 0.999]",
        "bf16.enabled": "its default, false",
    }
    assert found.honoured == {"optimizer.type": "AdamW", "zero_optimization.stage": 2}
    assert list(found.without_effect) == ["zero_optimization.reduce_bucket_size"]
    # It is a report: nothing is logged beside it.
    assert caplog.records == []


def test_what_a_run_would_warn_of_is_a_note() -> None:
    found = check_config({**BASE, "bfloat16": {"enabled": "auto"}})
    (note,) = found.notes
    assert "'bfloat16' is deprecated, write 'bf16'" in note
    assert "bf16.enabled" in found.auto


def test_two_spellings_with_two_values_are_a_refusal_of_the_older_one() -> None:
    both = {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}
    assert refused({**BASE, **both}) == ["bfloat16"]


def raised_by_reading(file: Path) -> str | None:
    """The key of the error that reading the file ends with; None for none."""
    try:
        load_config(str(file))
    except SpmdZeroConfigError as error:
        return error.key
    return None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_that_is_read_has_no_refusal_and_each_of_its_keys_is_told_of(file: Path) -> None:
    found = check_config(file)
    raised = raised_by_reading(file)
    if raised is None:
        assert found.refused == ()
    else:
        assert raised in {*(r.key for r in found.refused), *found.auto}
    told = [*found.without_effect, *found.auto, *found.honoured, *(r.key for r in found.refused)]
    assert len(told) == len(set(told))
    top = {key.partition(".")[0] for key in told}
    renamed = {"bfloat16": "bf16"}
    assert {renamed.get(key, key) for key in json.loads(file.read_text())} == top
