"""Reads keys of a config from the command line, ``bf16.enabled=true``, and says them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spmdzero.errors import SpmdZeroUsageError


def changes(settings: Iterable[str]) -> dict[str, Any]:
    """Dotted key -> value; a value that is no JSON is a string.

    Raises:
        SpmdZeroUsageError: a setting is malformed.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise SpmdZeroUsageError(f"--set {setting}: write KEY=VALUE, such as bf16.enabled=true")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def said(config: Path, settings: Mapping[str, Any]) -> str:
    """The config of a command in words: its file, and the keys that ``--set`` gave it."""
    return " ".join([str(config), *(f"{key}={json.dumps(v)}" for key, v in settings.items())])
