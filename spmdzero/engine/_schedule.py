"""What the engine asks of a learning-rate schedule."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim.lr_scheduler import ReduceLROnPlateau

from spmdzero.errors import SpmdZeroUsageError


class Scheduler(Protocol):
    """A schedule that sets the lr of an optimizer's param groups."""

    def step(self) -> Any:
        """Sets the lr of the next step."""


def require_metrics(schedule: Scheduler | None, lr_kwargs: Mapping[str, Any]) -> None:
    """Raises SpmdZeroUsageError for a schedule that can't step without a metric, and has none."""
    if isinstance(schedule, ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise SpmdZeroUsageError(
            "ReduceLROnPlateau needs a metric at each step: engine.step(lr_kwargs={"
            '"metrics": value}), or leave it out of initialize and step it yourself'
        )
