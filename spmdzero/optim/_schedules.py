"""DeepSpeed's warm-up schedules, number for number (DeepSpeed, runtime/lr_schedules.py)."""

import math
import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from spmdzero.optim._schedule import DeepSpeedSchedule, checked, per_group


class _WarmupSchedule(DeepSpeedSchedule):
    """The warm-up curve of all three schedules."""

    def __init__(
        self,
        *,
        optimizer: Optimizer,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        super().__init__(optimizer=optimizer, last_batch_iteration=last_batch_iteration)
        # The log curve divides by log(warmup_num_steps).
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type

    def _warmup_gamma(self) -> float:
        """How far the warm-up has come, 0 to 1."""
        if self.warmup_type == "linear":
            return self.last_batch_iteration / self.warmup_num_steps
        # log(a) / log(b) differs in the last bit: DeepSpeed multiplies by the inverse.
        return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last_batch_iteration + 1)

    def _is_warming_up(self) -> bool:
        return self.last_batch_iteration < self.warmup_num_steps


class WarmupLR(_WarmupSchedule):
    """From `warmup_min_lr` to `warmup_max_lr`, and stay there.

    At construction the param groups get `warmup_min_lr`, and the first `step` keeps it: with one
    `step` after each update, updates 1 and 2 both run at `warmup_min_lr`.

    Args:
        optimizer: its `param_groups` are written.
        warmup_min_lr: one number, or one per param group.
        warmup_max_lr: one number, or one per param group; None is what each group has now.
        warmup_num_steps: length of the warm-up in steps; 1 counts as 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: -1 to start; the param groups are left alone otherwise.

    Raises:
        SpmdZeroConfigError: a parameter of the wrong type, range or length.
    """

    @checked("WarmupLR")
    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        if last_batch_iteration == -1:
            self.write_lr(self.get_lr())

    def get_lr(self) -> list[float]:
        """The learning rate of each param group at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        gamma = self._warmup_gamma() if self._is_warming_up() else self._gamma_after_warmup()
        return [
            low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _gamma_after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line to `warmup_min_lr` at `total_num_steps`.

    Args:
        optimizer: its `param_groups` are written.
        total_num_steps: steps of the whole schedule, warm-up included.
        warmup_min_lr, and the others: as `WarmupLR`.

    Raises:
        SpmdZeroConfigError: a parameter of the wrong type, range or length.
    """

    @checked("WarmupDecayLR")
    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        _warn_if_all_warmup(total_num_steps, self.warmup_num_steps)

    def _gamma_after_warmup(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_WarmupSchedule):
    """From a fraction of each group's own lr up to all of it, then half a cosine down.

    The parameters are ratios of the lr that each group has at construction. From then until the
    first `step` the param groups hold 0.0, whatever `warmup_min_ratio` says, as in DeepSpeed.

    Args:
        optimizer: its `param_groups` are written.
        total_num_steps: steps of the whole schedule, warm-up included.
        warmup_min_ratio: the ratio at the first `step`.
        cos_min_ratio: the ratio at `total_num_steps` and after.
        warmup_num_steps, warmup_type, last_batch_iteration: as `WarmupLR`.

    Raises:
        SpmdZeroConfigError: a parameter of the wrong type or range.
    """

    @checked("WarmupCosineLR")
    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_if_all_warmup(total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self.write_lr(self.get_lr())

    def get_lr_ratio(self) -> float:
        """The fraction of each group's own lr at `last_batch_iteration`; 0.0 before the start."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self._is_warming_up():
            return self.warmup_min_ratio + self._warmup_gamma() * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


def _warn_if_all_warmup(total_num_steps: float, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        warnings.warn(
            f"total_num_steps {total_num_steps} is less than warmup_num_steps {warmup_num_steps}: "
            "the schedule ends before the warm-up does.",
            stacklevel=4,
        )
