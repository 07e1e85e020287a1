"""Configs that are refused, as rows of a table."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from spmdzero.config import load_config
from spmdzero.errors import SpmdZeroConfigError


def refused(config: Any, **kwargs: Any) -> SpmdZeroConfigError:
    """The error that loading a config raises."""
    with pytest.raises(SpmdZeroConfigError) as caught:
        load_config(config, **kwargs)
    return caught.value


def nested(key: str, value: Any) -> Any:
    """A config with a value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def differing(rows: Iterable[tuple[Any, str, str]]) -> list[str]:
    """Of rows of config, key and words those whose error has another key, or not the words."""
    found = []
    for config, key, words in rows:
        try:
            load_config(config)
            found.append(f"{json.dumps(config)} is accepted")
        except SpmdZeroConfigError as error:
            if error.key != key or words not in str(error):
                found.append(f"{json.dumps(config)}: {error}")
    return found
