"""Checks the names, types and ranges of parameters of optimizers and schedules."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard

from pydantic import create_model

from spmdzero.config._errors import parse
from spmdzero.config._types import Section


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number; a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_params(model: type[Section], params: Mapping[str, Any], *, at: str) -> None:
    """Returns if `model` accepts the parameters.

    Args:
        model: a value of `OPTIMIZERS` or `SCHEDULES`, or a result of `class_parameters`.
        params: name -> value.
        at: path of the parameters in messages, ``"optimizer.params"`` or ``"scheduler.params"``.

    Raises:
        SpmdZeroConfigError: an unknown name, a missing one, or a value of the wrong type or range.
    """
    parse(model, params, known={"": model.json_keys()}, at=at)


def class_parameters(cls: type, *, without: str) -> type[Section]:
    """A section with the argument names of torch's class `cls`; torch checks the values."""
    fields: dict[str, Any] = {
        parameter.name: (Any, ... if parameter.default is parameter.empty else parameter.default)
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.name != without
    }
    return create_model(cls.__name__, __base__=Section, **fields)
