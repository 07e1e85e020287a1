"""Config files in the styles that are found in the wild."""

import json
import logging
from pathlib import Path

import pytest

from spmdzero.config import load_config, resolve_batch_sizes
from tests.support.refusals import differing

pytestmark = pytest.mark.backends("any")

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

# File: stage, precision, and the batch sizes (train, micro, accumulation) on 8 devices.
EXPECTED = {
    "accelerate_zero2.json": (2, "bf16", (16, 2, 1)),
    "deepspeed_examples_bert.json": (0, "fp16", (4096, 64, 8)),
    "deepspeed_examples_cifar10.json": (1, "fp16", (16, 2, 1)),
    "hf_zero2_filled.json": (2, "bf16", None),
    "lightning_zero2.json": (2, "bf16", (8, 1, 1)),
    "many_features_off.json": (2, "bf16", (64, 8, 1)),
    "megatron_zero1.hjson": (1, "bf16", (32, 1, 4)),
    "megatron_zero2_fp16.json": (2, "fp16", (256, 4, 8)),
}


def test_every_file_but_the_unfilled_one_is_looked_at():
    assert {path.name for path in CONFIGS.iterdir()} == {*EXPECTED, "hf_zero2_auto.json"}


def test_each_file_loads_with_its_stage_precision_and_batch_sizes():
    for name, (stage, precision, sizes) in EXPECTED.items():
        config = load_config(CONFIGS / name)
        enabled = (config.bf16.enabled, config.fp16.enabled)
        assert config.zero_optimization.stage == stage
        assert enabled == (precision == "bf16", precision == "fp16")
        if sizes:
            found = resolve_batch_sizes(config, dp_world_size=8)
            assert (found.train, found.micro, found.accumulation) == sizes


def test_words_without_quotes_are_strings_of_an_hjson_file():
    config = load_config(CONFIGS / "megatron_zero1.hjson")
    assert config.data_types.grad_accum_dtype == "fp32"


def test_an_infinite_number_of_a_file_is_read_as_such():
    assert load_config(CONFIGS / "accelerate_zero2.json").steps_per_print is None


# Older spellings


def warned(caplog, config):
    with caplog.at_level(logging.WARNING, logger="spmdzero"):
        loaded = load_config(config)
    return loaded, caplog.text


def test_the_boolean_zero_form_works_and_warns(caplog):
    for given, stage in ((True, 1), (False, 0)):
        config, text = warned(caplog, {"zero_optimization": given, "allgather_size": 5e8})
        assert config.zero_optimization.stage == stage
        assert f'"stage": {stage}' in text


def test_an_old_spelling_works_and_warns(caplog):
    config, text = warned(caplog, {"bfloat16": {"enabled": True}})
    assert config.bf16.enabled
    assert "'bfloat16' is deprecated, write 'bf16'" in text
    old = "stage3_gather_fp16_weights_on_model_save"
    config, text = warned(caplog, {"zero_optimization": {old: True}})
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert f"'zero_optimization.{old}' is deprecated" in text
    assert [*config.no_meaning] == ["zero_optimization.stage3_gather_16bit_weights_on_model_save"]
    for key in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
        _, text = warned(caplog, {"zero_optimization": {key: False}})
        assert f"'zero_optimization.{key}' is deprecated" in text


def test_the_oldest_spellings_of_offloading_are_read_as_todays():
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        for more in ({}, {new: {"device": "CPU", "pin_memory": True}}):
            zero = load_config({"zero_optimization": {old: True, **more}}).zero_optimization
            assert getattr(zero, new).device == "cpu"
            assert getattr(zero, old) is None
        off = load_config({"zero_optimization": {old: False}}).zero_optimization
        assert getattr(off, new) is None
        both = {"zero_optimization": {old: True, new: {"device": "none"}}}
        assert differing([(both, f"zero_optimization.{old}", "as 'none'")]) == []


def test_the_second_spelling_of_a_stage_3_key_works_in_silence(caplog):
    config, text = warned(caplog, {"zero_optimization": {"prefetch_bucket_size": 7}})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 7
    assert text == ""


def test_a_current_file_warns_of_nothing(caplog):
    current = json.loads((CONFIGS / "lightning_zero2.json").read_text())
    del current["aio"]["thread_count"]
    assert warned(caplog, current)[1] == ""


def test_two_spellings_of_one_key_are_one_or_refused():
    both = {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}
    assert load_config(both).bf16.enabled
    reuse = {"max_reuse_distance": 1, "stage3_max_reuse_distance": 2}
    rows = [
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bfloat16", "spelling"),
        ({"zero_optimization": reuse}, "zero_optimization.max_reuse_distance", "spelling"),
    ]
    assert differing(rows) == []
