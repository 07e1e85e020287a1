"""Parameters of optimizers and schedules: the one check of their names, types and ranges."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard

from pydantic import create_model

from spmdzero.config._errors import parse
from spmdzero.config._types import Section


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_params(model: type[Section], params: Mapping[str, Any], *, at: str) -> None:
    """Returns if `model` takes the parameters.

    Args:
        model: of `OPTIMIZERS`, of `SCHEDULES`, or a `class_parameters`.
        params: name -> value.
        at: what the message calls them, ``"optimizer.params"`` or ``"scheduler.params"``.

    Raises:
        SpmdZeroConfigError: an unknown name, a missing one, or a value of the wrong type or range.
    """
    parse(model, params, known={"": model.json_keys()}, at=at)


def class_parameters(cls: type, *, without: str) -> type[Section]:
    """The arguments of torch's class `cls` by name only: torch checks the values."""
    fields: dict[str, Any] = {
        parameter.name: (Any, ... if parameter.default is parameter.empty else parameter.default)
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.name != without
    }
    return create_model(cls.__name__, __base__=Section, **fields)
