"""Each key that DeepSpeed 0.19.8 reads is honoured, or has no meaning here, or is refused."""

import json
from pathlib import Path

import pytest

from spmdzero.config import NO_MEANING, load_config
from spmdzero.config._deprecated import DEPRECATED, SECOND_SPELLINGS
from spmdzero.config._ignored import IGNORING
from spmdzero.config._keys import REMOVED
from spmdzero.config._models import SECTIONS
from spmdzero.config._must_be_off import OFF_ONLY, OffSection
from spmdzero.errors import SpmdZeroConfigError
from tests.support.refusals import nested, refused

pytestmark = pytest.mark.backends("any")

DATA = Path(__file__).parents[1] / "data"
KEYS = json.loads((DATA / "deepspeed_0_19_8_keys.json").read_text())
UNKNOWN = json.loads((DATA / "deepspeed_unknown_keys.json").read_text())
DEFAULTS = {key: entry["default"] for key, entry in KEYS.items() if "default" in entry}
REQUIRED = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
SPELLINGS = {**DEPRECATED, **SECOND_SPELLINGS}


def reason(config):
    """Why a config is refused; "" where it isn't."""
    try:
        load_config(config)
    except SpmdZeroConfigError as error:
        return error.reason
    return ""


def test_every_key_of_deepspeed_is_known_to_the_reader_and_in_one_table_at_most(caplog):
    assert len(KEYS) > 200
    assert [key for key in KEYS if "has no key" in reason(nested(key, "no such value"))] == []
    assert ignored(caplog) == []
    tables = [set(NO_MEANING), set(OFF_ONLY), set(REMOVED)]
    assert len(set.union(*tables)) == sum(map(len, tables))


def ignored(caplog):
    """The keys that were said to be ignored, and the hints."""
    records = [record for record in caplog.records if "ignores it" in record.msg]
    return [record.args for record in records]


def test_an_unknown_key_is_ignored_where_deepspeed_ignores_it_and_refused_where_it_refuses(caplog):
    assert {at for at, does in UNKNOWN.items() if does == "ignored"} == {"", *IGNORING}
    for section, does in UNKNOWN.items():
        key = f"{section}.no_such_key".lstrip(".")
        config = REQUIRED | nested(key, 1)
        if section in REQUIRED:
            config[section] |= REQUIRED[section]
        caplog.clear()
        if does == "ignored":
            assert load_config(config).source == config
            assert load_config(config).model_dump() == load_config(REQUIRED).model_dump()
            assert ignored(caplog) == [(key, "")]
        else:
            assert refused(config).key == key


def test_an_ignored_key_is_said_once_with_the_known_one_that_it_resembles(caplog):
    resembled = {
        "gradient_cliping": "gradient_clipping",
        "Train_Batch_Size": "train_batch_size",
        "comms_config": "comms_logger",
        "stage": "zero_optimization.stage",
        "fp32_allreduce": "communication_data_type",
        "data_types.grad_accumulation_dtype": "grad_accum_dtype",
        "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
        "max_grad_norm": "gradient_clipping",
        "optimizer.eps": "optimizer.params.eps",
        "optimizer.weight_decay": "optimizer.params.weight_decay",
        "scheduler.warmup_num_steps": "scheduler.params.warmup_num_steps",
        "smpd": "spmd",
    }
    others = ["_comment", "log", "cuda_visible_devices"]
    for key in [*resembled, *others]:
        for _ in range(2):
            named = nested(key, 1)
            for section in named.keys() & REQUIRED.keys():
                named[section] |= REQUIRED[section]
            load_config(named)
    assert all(record.levelname == "WARNING" for record in caplog.records)
    expected = [(key, f". Did you mean {name!r}?") for key, name in resembled.items()]
    assert ignored(caplog) == [*expected, *((key, "") for key in others)]


def test_the_defaults_of_deepspeed_are_accepted_and_ours():
    # The presence of these turns a feature on.
    on = ("zero_optimization.zenflow.", "weight_quantization.enabled")
    accepted = {key: value for key, value in DEFAULTS.items() if not key.startswith(on)}
    assert {key: why for key, v in accepted.items() if (why := reason(nested(key, v)))} == {}

    honoured = 0
    for key, default in DEFAULTS.items():
        section, _, name = SPELLINGS.get(key, key).rpartition(".")
        if key not in {**OFF_ONLY, **REMOVED} and section in SECTIONS:
            field = SECTIONS[section].model_fields[SECTIONS[section].json_keys()[name]]
            assert field.get_default(call_default_factory=True) == default, key
            honoured += 1
    assert honoured > 100


def test_every_key_without_meaning_is_one_that_its_section_takes():
    for key in NO_MEANING:
        section, _, name = key.rpartition(".")
        assert name in SECTIONS[section].json_keys()


def test_a_refused_key_is_accepted_while_it_asks_for_nothing_and_says_why_otherwise():
    for key, rule in OFF_ONLY.items():
        asked = key
        if isinstance(rule, OffSection):
            asked = f"{key}.{next(iter(rule.off))}"
            off = {name: v[0] if isinstance(v, tuple) else v for name, v in rule.off.items()}
            values = [off | dict.fromkeys(rule.idle, 7), {}, None]
        else:
            values = [*(rule.off if isinstance(rule.off, tuple) else (rule.off,)), None]
        for value in values:
            assert load_config(nested(key, value)).no_meaning == {}
        error = refused(nested(asked, 12345))
        assert (error.key, error.reason) == (asked, rule.reason)
        assert error.fix.endswith(".")
