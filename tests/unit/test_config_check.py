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

pytestmark = pytest.mark.backends("any")

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
    why = "DeepSpeed doesn't know this key and ignores it. Did you mean 'gradient_clipping'?"
    assert found.without_effect == {"gradient_cliping": why}
    # It is said once.
    assert found.notes == ()


def test_a_config_without_rows_is_noted_and_one_with_auto_is_not() -> None:
    found = check_config({"bf16": {"enabled": True}})
    assert found.refused == ()
    (note,) = found.notes
    assert "no train_batch_size" in note
    assert "Trainer" in note
    assert check_config({"train_batch_size": "auto"}).notes == ()


def test_fp16_without_zero_is_noted_as_in_a_run() -> None:
    fp16 = {**BASE, "fp16": {"enabled": True}}
    assert [note[:17] for note in check_config(fp16).notes] == ["fp16 without ZeRO"]
    assert check_config({**fp16, "zero_optimization": {"stage": 1}}).notes == ()


def test_params_are_those_of_the_optimizer_that_takes_a_refused_ones_place() -> None:
    params = {"lr": 1e-3, "weight_decay": 0.1, "freeze_step": 400, "cuda_aware": False}
    found = check_config({**BASE, "optimizer": {"type": "OneBitAdam", "params": params}})
    at = "optimizer.params."
    assert {r.key for r in found.refused} == {
        "optimizer.type", f"{at}freeze_step", f"{at}cuda_aware",
    }  # fmt: skip
    assert {f"{at}lr", f"{at}weight_decay"} <= found.honoured.keys()
    mended = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    assert refused({**BASE, "optimizer": mended}) == []


def test_params_of_an_unknown_optimizer_or_schedule_are_said_to_be_unchecked() -> None:
    config = {
        **BASE,
        "optimizer": {"type": "Shampoo", "params": {"lr": 1e-3}},
        "scheduler": {"type": "Cosine", "params": {"steps": 3}},
    }
    found = check_config(config)
    assert [r.key for r in found.refused] == ["optimizer.type", "scheduler.type"]
    assert found.unchecked == {"optimizer.params.lr": 1e-3, "scheduler.params.steps": 3}
    assert not [key for key in found.honoured if "params" in key]


def test_keys_of_stage_3_are_without_effect_below_it() -> None:
    keys = {
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 10,
        "zero_hpz_partition_size": 2,
    }
    for stage in range(4):
        found = check_config({**BASE, "zero_optimization": {"stage": stage, **keys}})
        at = "zero_optimization."
        named = [f"{at}offload_param.device", *(f"{at}{key}" for key in [*keys][1:])]
        without = [key for key in named if key in found.without_effect]
        assert without == (named if stage < 3 else [])
        assert {key for key in named if key in found.honoured} == {*named} - {*without}


TAKEN = {
    "checkpoint": {"use_node_local_storage": True},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
    "steps_per_print": "inf",
    "optimizer": {"type": "Adam", "params": {"torch_adam": "torch_impl"}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    "compile": {"deepcompile": True},
    "flops_profiler": {"enabled": True, "profile_step": -1},
    "data_types": {"keep_in_fp32_modules": ["e_score*"]},
    "data_efficiency": {"enabled": True, "data_routing": {"enabled": True}},
    "comet": {"enabled": True, "mode": "create"},
}


@pytest.mark.parametrize("key", TAKEN)
def test_what_deepspeed_takes_and_moves_no_other_number_is_taken(key: str) -> None:
    assert refused(BASE | {key: TAKEN[key]}) == []


def test_what_is_taken_without_effect_says_so() -> None:
    found = check_config(BASE | TAKEN)
    keys = {"zero_optimization.offload_optimizer.ratio", "compile.deepcompile"}
    assert keys <= found.without_effect.keys()
    assert {"checkpoint.use_node_local_storage", "comet.enabled"} <= found.honoured.keys()
    said = " ".join(found.notes)
    assert "'cosine', which is neither" in said
    assert "drops no tokens" in said
    assert load_config(BASE | TAKEN).steps_per_print is None


def test_a_pass_that_divides_the_model_needs_the_axis_that_does_it_here() -> None:
    passes = {"compile": {"deepcompile": True, "passes": ["autosp"]}}
    (found,) = check_config(BASE | passes).refused
    assert (found.key, "sequence_parallel_size" in found.fix) == ("compile.passes", True)
    assert refused(BASE | passes | {"sequence_parallel_size": 2}) == []


def test_a_curriculum_is_refused() -> None:
    sampling = {"enabled": True, "data_sampling": {"enabled": True}}
    (found,) = check_config(BASE | {"data_efficiency": sampling}).refused
    assert found.key == "data_efficiency.enabled"
    assert "data_sampling" in found.fix


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
