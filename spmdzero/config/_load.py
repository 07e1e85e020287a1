"""From a file, a dict or the command line's arguments to a checked config."""

import copy
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from spmdzero.config._auto import resolve_auto
from spmdzero.config._combinations import check_combinations
from spmdzero.config._deprecated import modernise
from spmdzero.config._errors import first_error
from spmdzero.config._models import SECTIONS, SpmdZeroConfig
from spmdzero.config._params import (
    OPTIMIZERS,
    SCHEDULES,
    torch_optimizer_params,
    torch_schedule_params,
)
from spmdzero.config._read import one_of, read
from spmdzero.config._screen import keys_without_meaning, off_names, screen
from spmdzero.config._types import Section
from spmdzero.config._values import check_values

_Model = TypeVar("_Model", bound=Section)


def load_config(
    config: str | os.PathLike[str] | dict[str, Any] | None, *, args: object = None
) -> SpmdZeroConfig:
    """The checked config.

    Args:
        config: path of a JSON or Hjson file, the base64 encoding of its text, or its content as
            a dict, which is not changed; None takes ``args.deepspeed_config``.
        args: the parsed command line, for example an argparse.Namespace.

    Raises:
        SpmdZeroConfigError: there is no config or more than one, the file can't be read, or a
            key can't be honoured.
    """
    given = read(one_of(config, getattr(args, "deepspeed_config", None)))
    check_values(given)
    source, raw = copy.deepcopy(given), copy.deepcopy(given)
    modernise(raw)
    no_meaning = keys_without_meaning(raw)
    resolve_auto(raw)
    screen(raw)
    checked = _parse(SpmdZeroConfig, raw)
    _check_params(checked)
    check_combinations(checked)
    checked._source = source
    checked._no_meaning = no_meaning
    return checked


def _check_params(config: SpmdZeroConfig) -> None:
    if config.optimizer:
        name, params = config.optimizer.type, config.optimizer.params
        _parse(OPTIMIZERS.get(name) or torch_optimizer_params(name), params, at="optimizer.params")
    if config.scheduler:
        name, params = config.scheduler.type, config.scheduler.params
        _parse(SCHEDULES.get(name) or torch_schedule_params(name), params, at="scheduler.params")


def _parse(model: type[_Model], raw: Mapping[str, Any], *, at: str = "") -> _Model:
    sections = {at: model} if at else SECTIONS
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        known = {
            path.removeprefix(at): {*section.json_keys(), *off_names(path)}
            for path, section in sections.items()
        }
        raise first_error(error, raw=raw, known=known, at=at) from None
