"""Where a config may come from, and what is refused before any key is looked at."""

import argparse
import base64
import json

import pytest

from spmdzero.config import load_config, old_argument
from tests.support.refusals import refused

pytestmark = pytest.mark.backends("any")

HJSON = """
# A comment, as in many real files.
{
  train_batch_size: 8
  zero_optimization: {
    stage: 2,
    reduce_bucket_size: 5e8,  // no quotes, no comma above, a trailing one below
    /* ... */
  },
  "bf16": {"enabled": true},
}
"""


def written(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    return path


# Files


def test_an_hjson_file_loads(tmp_path):
    config = load_config(written(tmp_path, HJSON))
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 2)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.bf16.enabled


def test_a_duplicate_key_of_an_hjson_file_is_refused(tmp_path):
    error = refused(written(tmp_path, "{train_batch_size: 8\ntrain_batch_size: 16\n}"))
    assert (error.key, error.value) == ("train_batch_size", [8, 16])


def test_malformed_text_is_refused_without_another_exception(tmp_path):
    digits = "9" * 5000
    unended = ("{", "}", "{a:", "'''a", "[1, 2", '"a')
    for text in (*unended, "{a: 1e400}", digits, f'{{"a": {digits}'):
        assert "neither JSON nor Hjson" in refused(written(tmp_path, text)).reason
    for text in ("", " \n"):
        assert "empty" in refused(written(tmp_path, text)).reason
    for text in ("[]", "3", '"a"', "null", "stage two please"):
        assert "object" in refused(written(tmp_path, text)).reason


def test_long_malformed_text_is_shown_shortened(tmp_path):
    assert len(refused(written(tmp_path, "[" * 10_000)).value) < 100


def test_the_oldest_argument_carries_the_path_too_with_a_warning(tmp_path, caplog):
    path = str(written(tmp_path, '{"train_batch_size": 8}'))
    args = argparse.Namespace(deepspeed_config=None, deepscale_config=path)
    assert load_config(None, args=args).train_batch_size == 8
    assert "write --deepspeed_config" in caplog.text
    args.deepspeed_config = "other.json"
    assert "other.json" in refused(None, args=args).reason


def test_config_params_beside_another_config_is_ignored_as_in_deepspeed_and_said_once(caplog):
    first, second = {"train_batch_size": 8}, {"train_batch_size": 16}
    assert old_argument(None, second) is second
    for same in (None, dict(first)):
        assert old_argument(first, same) is first
    assert caplog.text == ""
    for _ in range(2):
        assert old_argument(first, second) is first
    assert caplog.text.count("initialize(config_params=...) is ignored") == 1


def test_args_may_carry_the_path(tmp_path):
    path = written(tmp_path, '{"train_batch_size": 8}')
    args = argparse.Namespace(deepspeed_config=str(path))
    assert load_config(None, args=args).train_batch_size == 8


def test_the_same_path_twice_is_one_config(tmp_path, monkeypatch):
    path = written(tmp_path, '{"train_batch_size": 8}')
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(deepspeed_config=path.name)
    assert load_config(path, args=args).train_batch_size == 8


def test_args_without_a_config_leave_the_given_one():
    args = argparse.Namespace(deepspeed_config=None)
    assert load_config({"train_batch_size": 8}, args=args).train_batch_size == 8


def test_a_byte_order_mark_is_not_content(tmp_path):
    assert load_config(written(tmp_path, '\ufeff{"train_batch_size": 8}')).train_batch_size == 8


def test_no_config_tells_the_ways_to_pass_one():
    assert "--deepspeed_config" in refused(None).fix
    assert "--deepspeed_config" in refused(None, args=argparse.Namespace()).fix


def test_two_different_configs_are_refused():
    args = argparse.Namespace(deepspeed_config="other.json")
    assert "other.json" in refused({"train_batch_size": 8}, args=args).reason


def test_a_missing_file_is_named_with_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("nowhere.json").value == str(tmp_path / "nowhere.json")


def test_a_folder_is_not_a_config(tmp_path):
    assert "can't be read" in refused(tmp_path).reason


def test_malformed_json_shows_line_column_and_the_line(tmp_path):
    error = refused(written(tmp_path, '{\n  "train_batch_size": 8,\n  "bf16" true\n}'))
    assert "line 3, column 10" in error.reason
    assert error.value == '  "bf16" true'


def test_a_duplicate_key_is_refused_wherever_it_is(tmp_path):
    error = refused(written(tmp_path, '{"bf16": {"enabled": true, "enabled": false}}'))
    assert error.key == "enabled"
    assert error.value == [True, False]


def test_a_config_of_another_type_is_refused():
    assert refused(42).value == 42


# Base64


def test_both_alphabets_of_base64_are_read():
    # "?" and ">" in these places give the two characters in which the alphabets differ.
    text = '{"train_batch_size": 8, "csv_monitor": {"job_name": "a?b>>>???"}}'
    plain, safe = base64.b64encode(text.encode()), base64.urlsafe_b64encode(text.encode())
    assert plain != safe
    for encoded in (plain, safe):
        assert load_config(encoded.decode()).csv_monitor.job_name == "a?b>>>???"


def test_base64_of_a_longer_text_than_a_path_may_have_loads():
    text = json.dumps({"train_batch_size": 8}) + " " * 10_000
    assert load_config(base64.b64encode(text.encode()).decode()).train_batch_size == 8


def test_base64_of_json_and_hjson_loads_as_an_argument_too():
    for text in (json.dumps({"train_batch_size": 8}), "{train_batch_size: 8\n}"):
        encoded = base64.urlsafe_b64encode(text.encode()).decode()
        args = argparse.Namespace(deepspeed_config=encoded)
        assert load_config(encoded).train_batch_size == 8
        assert load_config(None, args=args).train_batch_size == 8


def test_a_duplicate_key_in_base64_is_refused():
    encoded = base64.b64encode(b'{"train_batch_size": 8, "train_batch_size": 9}').decode()
    assert refused(encoded).value == [8, 9]


def test_a_string_that_is_neither_path_nor_base64_says_so():
    for config in ("", "configs", "Y29uZmlncw==", "a\0b", "\ud800"):
        assert refused(config).key == "config"


# Values that no JSON holds


def test_a_config_that_contains_itself_is_refused():
    config = {"train_batch_size": 8}
    config["optimizer"] = config
    assert "nested" in refused(config).reason


def test_a_deep_file_is_refused(tmp_path):
    assert "nested" in refused(written(tmp_path, '{"a":' * 100 + "1" + "}" * 100)).reason


def test_a_number_that_python_would_not_print_is_refused():
    assert refused({"train_batch_size": 10**5000}).key == "train_batch_size"


def test_a_value_that_is_not_json_is_refused():
    error = refused({"bf16": {"enabled": {1, 2}}})
    assert (error.key, error.reason) == ("bf16.enabled", "set is not a JSON value")
