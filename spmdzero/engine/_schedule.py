"""Makes and checks the learning-rate schedule of an engine."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spmdzero.config import SchedulerConfig
from spmdzero.engine._groups import Groups
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import schedule_from_config
from spmdzero.state._training import Scheduler
from spmdzero.step._optimizer import ZeroOptimizer

logger = logging.getLogger("spmdzero")


def require_metrics(schedule: Scheduler | None, lr_kwargs: Mapping[str, Any]) -> None:
    """Raises SpmdZeroUsageError if a schedule needs a metric for its step and gets none."""
    if isinstance(schedule, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise SpmdZeroUsageError(
            "ReduceLROnPlateau needs a metric at each step: engine.step(lr_kwargs={"
            '"metrics": value}), or leave it out of initialize and step it yourself'
        )


def make_schedule(
    named: SchedulerConfig | None, given: Any, zero: ZeroOptimizer | None, groups: Groups | None
) -> Scheduler | None:
    """The schedule passed to `initialize`, or else the config's, bound to the optimizer.

    Raises:
        SpmdZeroUsageError: there is no optimizer, or the schedule is bound to a different one.
        SpmdZeroConfigError: the config's can't be made.
    """
    if given is None and named is None:
        return None
    if zero is None or groups is None:
        raise SpmdZeroUsageError(
            "a learning-rate schedule without an optimizer: name one in the config "
            '("optimizer": {"type": "AdamW", ...}) or pass optimizer= to initialize'
        )
    if given is None and named is not None:
        return schedule_from_config(named.type, named.params, zero)
    if named is not None:
        # As in DeepSpeed (runtime/engine.py, `_configure_lr_scheduler`).
        logger.info("the lr_scheduler passed to initialize is used, not the config's")
    if not hasattr(given, "step") and callable(given):
        return given(zero)
    if groups.client is None or getattr(given, "optimizer", groups.client) is not groups.client:
        raise SpmdZeroUsageError(
            "lr_scheduler is bound to an optimizer that was not passed to initialize, so it would "
            "change nothing. Pass that optimizer too, or a callable: "
            "lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 10)"
        )
    return given


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Makes torch's schedules believe that `optimizer` has taken a step.

    They warn if a schedule moves before the first step, and watch `Optimizer.step`, which a
    replayed step doesn't run. A user's own optimizer never takes a step: a real one could fail in a
    class that expects gradients.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
