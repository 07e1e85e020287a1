"""Makes a schedule of a scheduler in the config."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._schedule import DeepSpeedSchedule
from spmdzero.optim._schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

Schedule = DeepSpeedSchedule | LRScheduler

_OURS: dict[str, Any] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def schedule_from_config(
    type: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Schedule:
    """The schedule for `{"type": ..., "params": ...}`, bound to `optimizer`.

    DeepSpeed's names come first, then the classes of torch.optim.lr_scheduler, as in DeepSpeed
    (runtime/engine.py, `_scheduler_from_config`).

    Args:
        type, params: as checked by `load_config`.
        optimizer: its `param_groups` are written.

    Raises:
        SpmdZeroConfigError: the class refuses the values.
    """
    cls = _OURS.get(type) or getattr(torch.optim.lr_scheduler, type)
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
