"""Sets keys of a config from the command line: ``bf16.enabled=true``."""

import json
from collections.abc import Iterable
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


def changed(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Sets keys of the config in place, makes missing sections, and returns the config.

    Raises:
        SpmdZeroUsageError: a key is below a value that is no section.
    """
    for key, value in settings.items():
        *sections, name = key.split(".")
        holder: Any = config
        for depth, section in enumerate(sections, 1):
            holder = holder.setdefault(section, {})
            if not isinstance(holder, dict):
                raise SpmdZeroUsageError(
                    f"--set {key}=...: {'.'.join(sections[:depth])} is {holder!r} in the config, "
                    "and holds no keys"
                )
        holder[name] = value
    return config
