"""`engine.tput_timer`: the part of it that scripts call."""

from collections.abc import Callable
from typing import Any

from spmdzero._logging import log_once

_NO_TIMER = (
    "engine.tput_timer times nothing here: a step is one compiled program. "
    '"wall_clock_breakdown": true times each step'
)


class ThroughputTimer:
    """DeepSpeed's timer of samples per second, which here only counts epochs.

    Args:
        batch_size: returns the present train batch size.

    Attributes:
        epoch_count: number of calls of `update_epoch_count`.
    """

    def __init__(self, batch_size: Callable[[], int]) -> None:
        self._batch_size = batch_size
        self.epoch_count = 0

    @property
    def batch_size(self) -> int:
        """Number of samples of a step."""
        return self._batch_size()

    def update_epoch_count(self) -> None:
        """Counts an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """Does nothing, and logs that once."""
        log_once(_NO_TIMER)

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Does nothing, and logs that once."""
        log_once(_NO_TIMER)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("steps_per_output", "monitor_memory"):
            log_once(_NO_TIMER)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"engine.tput_timer.{name}: {_NO_TIMER}")
