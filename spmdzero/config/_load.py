"""From a file, a dict or the command line's arguments to a checked config."""

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from spmdzero.config._combinations import check_combinations
from spmdzero.config._errors import first_error
from spmdzero.config._models import SECTIONS, SpmdZeroConfig
from spmdzero.config._params import OPTIMIZERS, SCHEDULES, torch_schedule_params
from spmdzero.config._screen import keys_without_meaning, off_names, screened
from spmdzero.config._types import Section
from spmdzero.errors import SpmdZeroConfigError

_Model = TypeVar("_Model", bound=Section)


def load_config(
    config: str | os.PathLike[str] | dict[str, Any] | None, *, args: object = None
) -> SpmdZeroConfig:
    """The checked config.

    Args:
        config: path of a JSON file, or its content as a dict, which is not changed; None takes
            ``args.deepspeed_config``.
        args: the parsed command line, for example an argparse.Namespace.

    Raises:
        SpmdZeroConfigError: there is no config or more than one, the file can't be read, or a
            key can't be honoured.
    """
    source = copy.deepcopy(_read(_one_of(config, getattr(args, "deepspeed_config", None))))
    raw = screened(source)
    checked = _parse(SpmdZeroConfig, raw)
    _check_params(checked)
    check_combinations(checked)
    checked._source = source
    checked._no_meaning = keys_without_meaning(source)
    return checked


def _one_of(config: Any, from_args: Any) -> Any:
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


def _read(config: Any) -> dict[str, Any]:
    if isinstance(config, dict):
        return config
    if not isinstance(config, str | os.PathLike):
        raise SpmdZeroConfigError(
            key="config",
            value=config,
            reason="a config is a dict or the path of a JSON file",
            fix="Pass one of them.",
        )
    path = Path(config).absolute()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpmdZeroConfigError(
            key="config",
            value=str(path),
            reason="there is no file at this path",
            fix="Correct the path.",
        ) from None
    except (OSError, ValueError) as error:
        raise SpmdZeroConfigError(
            key="config",
            value=str(path),
            reason=f"the file can't be read ({error})",
            fix="Pass the path of a readable JSON file in UTF-8.",
        ) from error
    content = _parse_json(text, path=path)
    if not isinstance(content, dict):
        raise SpmdZeroConfigError(
            key=str(path),
            value=content,
            reason="the top level of a config is an object",
            fix='Write {"train_batch_size": ..., ...}.',
        )
    return content


def _parse_json(text: str, *, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        lines = text.splitlines()
        raise SpmdZeroConfigError(
            key=str(path),
            value=lines[error.lineno - 1] if error.lineno <= len(lines) else "",
            reason=f"malformed JSON at line {error.lineno}, column {error.colno} ({error.msg})",
            fix="Correct that line; JSON has no comments and no trailing commas.",
        ) from error


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


def _check_params(config: SpmdZeroConfig) -> None:
    if config.optimizer:
        _parse(OPTIMIZERS[config.optimizer.type], config.optimizer.params, at="optimizer.params")
    if config.scheduler:
        name, params = config.scheduler.type, config.scheduler.params
        _parse(SCHEDULES.get(name) or torch_schedule_params(name), params, at="scheduler.params")


def _parse(model: type[_Model], raw: Mapping[str, Any], *, at: str = "") -> _Model:
    sections = {at: model} if at else SECTIONS
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        known = {
            path.removeprefix(at): {*section.model_fields, *off_names(path)}
            for path, section in sections.items()
        }
        raise first_error(error, raw=raw, known=known, at=at) from None
