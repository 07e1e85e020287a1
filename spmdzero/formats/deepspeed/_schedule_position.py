"""Moves a schedule that is ahead of its run to the position of DeepSpeed's."""

import dataclasses

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._state import TrainingState

# Keys under which DeepSpeed's schedules and torch's keep their positions.
_POSITIONS = ("last_batch_iteration", "last_epoch", "_step_count")


def without_debt(state: TrainingState) -> TrainingState:
    """The same state with its schedule moved back by the steps that it owes for skipped ones.

    spmdzero's engine holds such a schedule back later (`ScheduleHold`); DeepSpeed's knows no debt,
    and would stay ahead.

    Raises:
        SpmdZeroUsageError: the schedule consists of others, whose positions aren't known.
    """
    host, hold = state.host, state.host.hold
    owed = (host.skipped or 0) - hold["held"] if hold is not None else 0
    if hold is None or host.scheduler is None or not owed:
        return state
    if "_schedulers" in host.scheduler:
        raise SpmdZeroUsageError(
            f"{state.source}: {owed} skipped steps are still to hold its schedule back, which is "
            f"made of others. Train {owed} steps more, save, and write that for DeepSpeed"
        )
    schedule = dict(host.scheduler)
    schedule |= {key: schedule[key] - owed for key in _POSITIONS if key in schedule}
    groups, passed = host.param_groups, hold["groups"]
    if groups is not None and passed:
        # If the schedule has not moved on since, the latest recorded position is the current one.
        back = owed - (1 if hold["moved"] else 0)
        then = passed[min(back, len(passed) - 1)]
        groups = [group | old for group, old in zip(groups, then, strict=True)]
        if "_last_lr" in schedule:
            schedule["_last_lr"] = [group["lr"] for group in groups]
    return dataclasses.replace(
        state,
        host=dataclasses.replace(host, scheduler=schedule, param_groups=groups, hold=None),
    )
