"""Checks that a config holds only values that a JSON file can hold, at any depth."""

from typing import Any

from spmdzero.errors import SpmdZeroConfigError

# Largest depth: more than any real config has, and far from Python's recursion limit.
_MAX_DEPTH = 50
# Largest integer: Python refuses to print more than 4300 digits, and no setting is that large.
_MAX_BITS = 2048


def check_values(config: dict[str, Any]) -> None:
    """Returns if the config is made of JSON values (tuples count as lists).

    Raises:
        SpmdZeroConfigError: a key is not a string, a value is no JSON value, an integer has more
            than 2048 bits, or the config is nested more than 50 deep, for example because it
            contains itself.
    """
    pending: list[tuple[str, Any, int]] = [("", config, 0)]
    while pending:
        path, value, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise _refused(path, type(value), reason=f"this is nested more than {_MAX_DEPTH} deep")
        if isinstance(value, dict):
            for name, item in value.items():
                if not isinstance(name, str):
                    raise _refused(path, name, reason="a key is not a string", fix="Use strings.")
                pending.append((f"{path}.{name}".lstrip("."), item, depth + 1))
        elif isinstance(value, list | tuple):
            pending.extend((path, item, depth + 1) for item in value)
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise _refused(
                path, f"{value.bit_length()} bits", reason="no setting is as large as this number"
            )
        elif not isinstance(value, str | int | float | None):
            raise _refused(
                path,
                value,
                reason=f"{type(value).__name__} is not a JSON value",
                fix="Write null, a boolean, a number, a string, a list or an object.",
            )


def _refused(
    path: str, value: object, *, reason: str, fix: str = "Correct this value."
) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(key=path or "config", value=value, reason=reason, fix=fix)
