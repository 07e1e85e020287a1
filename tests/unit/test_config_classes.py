"""Each key that DeepSpeed 0.19.8 reads is honoured, or has no meaning here, or is refused."""

import json
from pathlib import Path

import pytest

from spmdzero.config import NO_MEANING, key_class, load_config
from spmdzero.config._deprecated import DEPRECATED, SECOND_SPELLINGS
from spmdzero.config._keys import REMOVED
from spmdzero.config._models import SECTIONS
from spmdzero.config._off import OFF_ONLY, OffSection
from spmdzero.errors import SpmdZeroConfigError

KEYS = json.loads((Path(__file__).parents[1] / "data/deepspeed_0_19_8_keys.json").read_text())


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_deepspeed_is_in_one_class(key):
    assert key_class(key) is not None


@pytest.mark.parametrize("key", KEYS)
def test_no_key_of_deepspeed_is_unknown_to_the_reader(key):
    try:
        load_config(nested(key, "no such value"))
        reason = ""
    except SpmdZeroConfigError as error:
        reason = error.reason
    assert "has no key" not in reason


DEFAULTS = {key: entry["default"] for key, entry in KEYS.items() if "default" in entry}
SPELLINGS = {**DEPRECATED, **SECOND_SPELLINGS}


# Their presence turns the feature on.
PRESENT_IS_ON = ("zero_optimization.zenflow.", "weight_quantization.enabled")


@pytest.mark.parametrize("key", [key for key in DEFAULTS if not key.startswith(PRESENT_IS_ON)])
def test_the_default_of_deepspeed_is_accepted(key):
    load_config(nested(key, DEFAULTS[key]))


@pytest.mark.parametrize(
    "key",
    [
        key
        for key in DEFAULTS
        if key_class(key) != "refused" and SPELLINGS.get(key, key).rpartition(".")[0] in SECTIONS
    ],
)
def test_a_default_is_that_of_deepspeed(key):
    section, _, name = SPELLINGS.get(key, key).rpartition(".")
    model = SECTIONS[section]
    field = model.model_fields[model.json_keys()[name]]
    assert field.get_default(call_default_factory=True) == DEFAULTS[key]


def test_a_key_that_deepspeed_has_not_is_in_no_class():
    assert key_class("train_batch_sizes") is None
    assert key_class("zero_optimization.stages") is None
    assert key_class("nothing.at.all") is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train_batch_size", "honoured"),
        ("fp16.loss_scale", "honoured"),
        ("bfloat16", "honoured"),
        ("zero_allow_untested_optimizer", "honoured"),
        ("zero_optimization.reduce_bucket_size", "no meaning"),
        ("zero_optimization.max_live_parameters", "no meaning"),
        ("checkpoint.writer.type", "no meaning"),
        ("zero_optimization.offload_optimizer.device", "refused"),
        ("zero_optimization.zero_hpz_partition_size", "refused"),
        ("amp", "refused"),
    ],
)
def test_the_class_of_a_key(key, expected):
    assert key_class(key) == expected


def test_no_key_is_in_two_tables():
    tables = [set(NO_MEANING), set(OFF_ONLY), set(REMOVED)]
    assert len(set.union(*tables)) == sum(map(len, tables))


@pytest.mark.parametrize("key", OFF_ONLY)
def test_a_refused_key_is_accepted_while_it_asks_for_nothing(key):
    rule = OFF_ONLY[key]
    if isinstance(rule, OffSection):
        off = {name: v[0] if isinstance(v, tuple) else v for name, v in rule.off.items()}
        values = [off | dict.fromkeys(rule.idle, 7), {}, None]
    else:
        values = [*(rule.off if isinstance(rule.off, tuple) else (rule.off,)), None]
    for value in values:
        assert load_config(nested(key, value)).no_meaning == ()


@pytest.mark.parametrize("key", OFF_ONLY)
def test_a_refused_key_says_why_and_what_to_do(key):
    rule = OFF_ONLY[key]
    asked = key
    if isinstance(rule, OffSection):
        asked = f"{key}.{next(iter(rule.off))}"
    with pytest.raises(SpmdZeroConfigError) as caught:
        load_config(nested(asked, 12345))
    assert (caught.value.key, caught.value.reason) == (asked, rule.reason)
    assert caught.value.fix.endswith(".")
