"""DeepSpeed's learning rate range test, number for number (runtime/lr_schedules.py)."""

import math
from collections.abc import Sequence

from torch.optim import Optimizer

from spmdzero.optim._schedule import DeepSpeedSchedule, checked, per_group


class LRRangeTest(DeepSpeedSchedule):
    """Up from `lr_range_test_min_lr` without end, to find the lr at which training diverges.

    The policy is of arXiv 1803.09820, section 4.1. At construction the param groups get the
    lowest lr.

    Args:
        optimizer: its `param_groups` are written.
        lr_range_test_min_lr: one number, or one per param group.
        lr_range_test_step_size: steps in which the lr grows by `lr_range_test_step_rate` times
            the lowest lr.
        lr_range_test_step_rate: see there.
        lr_range_test_staircase: grow once per `lr_range_test_step_size` steps, not at each.
        last_batch_iteration: -1 to start; the param groups are left alone otherwise.

    Raises:
        SpmdZeroConfigError: a parameter of the wrong type, range or length.
    """

    @checked("LRRangeTest")
    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer=optimizer, last_batch_iteration=last_batch_iteration)
        self.min_lr = per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self.write_lr(self.min_lr)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group at `last_batch_iteration`."""
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]
