"""Finds and reads a config: a dict, a file in JSON or Hjson, or the base64 of its text."""

import base64
import binascii
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from spmdzero._logging import is_new
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError

_logger = logging.getLogger("spmdzero")
_LONGEST_SHOWN = 80


def named_by(args: object) -> Any:
    """The config that the command line names, or None.

    Raises:
        SpmdZeroConfigError: it names two configs, one by DeepSpeed's oldest spelling.
    """
    named, old = (getattr(args, f"{name}_config", None) for name in ("deepspeed", "deepscale"))
    if old is None:
        return named
    _logger.warning("--deepscale_config is deprecated, write --deepspeed_config")
    return old if named is None else one_of(old, named)


def old_argument(config: Any, config_params: Any) -> Any:
    """Returns `config` of `initialize`, or without it `config_params`.

    DeepSpeed does the same (``deepspeed/__init__.py``). If both are given and differ, a warning is
    logged once.
    """
    if config is None or config_params is None:
        return config_params if config is None else config
    if _comparable(config) != _comparable(config_params) and is_new("config_params"):
        _logger.warning(
            "initialize(config_params=...) is ignored, as in DeepSpeed: config=... is given too, "
            "and is another one"
        )
    return config


def one_of(config: Any, from_args: Any) -> Any:
    """The only given config.

    Raises:
        SpmdZeroConfigError: there is no config, or there are two different ones.
    """
    if config is None and from_args is None:
        raise SpmdZeroConfigError(
            key="config",
            value=None,
            reason="there is no config",
            fix="Pass config= a dict or the path of a JSON file, or --deepspeed_config a path.",
        )
    if config is None or from_args is None:
        return from_args if config is None else config
    if _comparable(config) != _comparable(from_args):
        raise SpmdZeroConfigError(
            key="config",
            value=config,
            reason=f"args.deepspeed_config names another one, {from_args!r}",
            fix="Pass only one of the two.",
        )
    return config


def _comparable(config: Any) -> Any:
    return os.path.abspath(config) if isinstance(config, str | os.PathLike) else config


def with_value(
    section: Mapping[str, Any], name: str, value: Any, *, at: str = "", otherwise: str
) -> dict[str, Any]:
    """The section with a value that code outside of the config says.

    Args:
        section: of a config, or all of it.
        name, value: the key, and what it has to be.
        at: the section's name and a dot; empty for the whole config.
        otherwise: why another value is an error.

    Raises:
        SpmdZeroConfigError: the section has another one.
    """
    if section.get(name, value) != value:
        raise SpmdZeroConfigError(
            key=f"{at}{name}", value=section[name], reason=otherwise, fix="Write it once."
        )
    return {**section, name: value}


def set_keys(config: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sets dotted keys of the config in place, makes missing sections, and returns the config.

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


def read(config: Any) -> dict[str, Any]:
    """The content of a config, found as in DeepSpeed's runtime/config.py.

    Args:
        config: a dict, which is returned as it is; the path of a file in JSON or Hjson; or the
            base64 encoding of such a file's text.

    Raises:
        SpmdZeroConfigError: there is no such file, it can't be read, it is malformed, a key occurs
            twice in one object, or the top level is no object.
    """
    if isinstance(config, dict):
        return config
    if not isinstance(config, str | os.PathLike):
        raise SpmdZeroConfigError(
            key="config",
            value=config,
            reason="a config is a dict, the path of a JSON file, or base64 of its text",
            fix="Pass one of them.",
        )
    text = None if os.path.exists(config) else _decoded(config)
    if text is not None:
        name = "base64"
    else:
        path = Path(config).absolute()
        name, text = str(path), _text(path)
    content = _parsed(text, name=name)
    if not isinstance(content, dict):
        raise SpmdZeroConfigError(
            key=name,
            value=content,
            reason="the top level of a config is an object",
            fix='Write {"train_batch_size": ..., ...}.',
        )
    return content


def _decoded(config: object) -> str | None:
    """The text that a string encodes, or None if the string is no base64 of an object's text."""
    if not isinstance(config, str):
        return None
    # urlsafe_b64encode and b64encode differ in two characters.
    plain = config.strip().translate(str.maketrans("-_", "+/"))
    try:
        text = base64.b64decode(plain, validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    # A path made of base64's letters can be decoded too, but hardly to text with these marks.
    return text if any(mark in text for mark in "{:") else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpmdZeroConfigError(
            key="config",
            value=str(path),
            reason="there is no file at this path, and it is not base64 of a config",
            fix="Correct the path.",
        ) from None
    except (OSError, ValueError) as error:
        raise SpmdZeroConfigError(
            key="config",
            value=str(path),
            reason=f"the file can't be read ({error})",
            fix="Pass the path of a readable JSON file in UTF-8.",
        ) from error


def _parsed(text: str, *, name: str) -> Any:
    if not text.strip():
        raise _malformed("", name=name, cause="it is empty")
    try:
        # JSON is tried first, as Hjson would read Infinity and NaN as strings.
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except SpmdZeroConfigError:
        raise
    except json.JSONDecodeError as error:
        return _parsed_hjson(text, name=name, as_json=error)
    except (ValueError, RecursionError):
        return _parsed_hjson(text, name=name)


def _parsed_hjson(text: str, *, name: str, as_json: json.JSONDecodeError | None = None) -> Any:
    try:
        return hjson.loads(text, object_pairs_hook=_without_duplicates)
    except SpmdZeroConfigError:
        raise
    except hjson.HjsonDecodeError as error:
        causes = [_place(error)]
        if as_json is not None:
            # JSON's error comes first: most files are meant as JSON, and Hjson fails later in the
            # file.
            causes.insert(0, f"as JSON {_place(as_json)}")
            causes[1] = f"as Hjson {causes[1]}"
        lines, number = text.splitlines(), (as_json or error).lineno
        line = lines[number - 1] if number <= len(lines) else ""
        raise _malformed(line, name=name, cause="; ".join(causes)) from error
    # hjson turns 1e400 into an int, and long digits and deep nesting fail in Python itself.
    except (OverflowError, ValueError, RecursionError) as error:
        raise _malformed(text, name=name, cause=str(error)) from error


def _place(error: json.JSONDecodeError | hjson.HjsonDecodeError) -> str:
    return f"line {error.lineno}, column {error.colno}: {error.msg}"


def _malformed(shown: str, *, name: str, cause: str) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(
        key=name,
        value=shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}...",
        reason=f"this is neither JSON nor Hjson ({cause})",
        fix="Correct that place.",
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise SpmdZeroConfigError(
                key=key,
                value=[value for name, value in pairs if name == key],
                reason=f"the key stands {count} times in one object",
                fix="Keep one of them.",
            )
    return dict(pairs)
