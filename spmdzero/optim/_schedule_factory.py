"""From a scheduler in the config to a schedule object."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._names import did_you_mean
from spmdzero.optim._one_cycle import OneCycle
from spmdzero.optim._range_test import LRRangeTest
from spmdzero.optim._schedule import DeepSpeedSchedule
from spmdzero.optim._schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR

Schedule = DeepSpeedSchedule | LRScheduler

_OURS: dict[str, Any] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def schedule_from_config(
    type: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Schedule:
    """The schedule that `{"type": ..., "params": ...}` stands for, bound to `optimizer`.

    DeepSpeed's names come first, then the classes of torch.optim.lr_scheduler, as in DeepSpeed
    (runtime/engine.py, `_scheduler_from_config`). Names are case-sensitive there too.

    Raises:
        SpmdZeroConfigError: an unknown type or parameter, a missing parameter, or a value that
            the class refuses.
    """
    classes = _OURS | _torch_schedules()
    if type not in classes:
        raise SpmdZeroConfigError(
            key="scheduler.type",
            value=type,
            reason="no schedule of DeepSpeed or torch.optim.lr_scheduler has this name",
            fix=did_you_mean(type, known=classes),
        )
    cls = classes[type]
    _check_params(cls, params)
    try:
        return cls(optimizer, **params)
    except SpmdZeroConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise SpmdZeroConfigError(
            key="scheduler.params",
            value=dict(params),
            reason=f"{type} refuses them: {error}",
            fix=f"See the signature: {type}{inspect.signature(cls)}.",
        ) from error


def _torch_schedules() -> dict[str, Any]:
    members = inspect.getmembers(torch.optim.lr_scheduler, inspect.isclass)
    return {
        name: cls
        for name, cls in members
        if issubclass(cls, LRScheduler) and cls is not LRScheduler and not name.startswith("_")
    }


def _check_params(cls: type, params: Mapping[str, Any]) -> None:
    arguments = dict(inspect.signature(cls).parameters)
    del arguments["optimizer"]
    for name, value in params.items():
        if name not in arguments:
            raise SpmdZeroConfigError(
                key=f"scheduler.params.{name}",
                value=value,
                reason=f"{cls.__name__} has no such parameter",
                fix=did_you_mean(name, known=arguments),
            )
    for name, argument in arguments.items():
        if argument.default is argument.empty and name not in params:
            raise SpmdZeroConfigError(
                key=f"scheduler.params.{name}",
                value=None,
                reason=f"{cls.__name__} can't do without it",
                fix=f'Add "{name}" to the params of the scheduler.',
            )
