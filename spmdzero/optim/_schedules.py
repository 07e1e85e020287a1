"""DeepSpeed's warm-up schedules, number for number (DeepSpeed, runtime/lr_schedules.py)."""

import math
import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from spmdzero.optim._schedule import DeepSpeedSchedule, checked, per_group


class _WarmupSchedule(DeepSpeedSchedule):
    """The warm-up curve of the three schedules with warm-up."""

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
        self.warmup_type = warmup_type if warmup_type == "linear" else "log"

    def _warmup_gamma(self) -> float:
        """The progress of the warm-up, 0 to 1."""
        if self.warmup_type == "linear":
            return self.last_batch_iteration / self.warmup_num_steps
        # Multiply by the inverse as DeepSpeed does: log(a) / log(b) differs in the last bit.
        return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last_batch_iteration + 1)

    def _is_warming_up(self) -> bool:
        return self.last_batch_iteration < self.warmup_num_steps


class WarmupLR(_WarmupSchedule):
    """Rises from `warmup_min_lr` to `warmup_max_lr`, and stays there.

    At construction the param groups get `warmup_min_lr`, and the first `step` keeps it: with one
    `step` after each update, updates 1 and 2 both run at `warmup_min_lr`.

    Args:
        optimizer: its `param_groups` are written.
        warmup_min_lr: one number, or one per param group.
        warmup_max_lr: one number, or one per param group; None takes each group's present lr.
        warmup_num_steps: length of the warm-up in steps; 1 counts as 2.
        warmup_type: "linear"; all else is "log", the shape of the curve.
        last_batch_iteration: -1 to start; with other values the param groups are left alone.

    Raises:
        SpmdZeroConfigError: a parameter has a wrong type, range or length.
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
    """`WarmupLR`, then a straight line down to `warmup_min_lr` at `total_num_steps`.

    Args:
        optimizer: its `param_groups` are written.
        total_num_steps: number of steps of the whole schedule with its warm-up.
        warmup_min_lr, and the others: as in `WarmupLR`.

    Raises:
        SpmdZeroConfigError: a parameter has a wrong type, range or length.
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
    """Rises from a fraction of each group's own lr to all of it, then falls by half a cosine.

    The parameters are ratios of the lr that each group has at construction. From then until the
    first `step` the param groups hold 0.0, whatever `warmup_min_ratio` says, as in DeepSpeed.

    Args:
        optimizer: its `param_groups` are written.
        total_num_steps: number of steps of the whole schedule with its warm-up.
        warmup_min_ratio: the ratio at the first `step`.
        cos_min_ratio: the ratio at `total_num_steps` and after.
        warmup_num_steps, warmup_type, last_batch_iteration: as in `WarmupLR`.

    Raises:
        SpmdZeroConfigError: a parameter has a wrong type or range.
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


_SECOND_BETA = 0.99


class OneCycle(DeepSpeedSchedule):
    """Cycles lr from `cycle_min_lr` to `cycle_max_lr` and back, then decays it; momentum inversely.

    The policy is that of arXiv 1803.09820. Momentum is the first of `betas`; the second becomes
    0.99, as in DeepSpeed. An optimizer without `betas` keeps its momentum, with a warning. Until
    the first `step` the param groups hold `cycle_min_lr` and `cycle_min_mom`.

    Args:
        optimizer: its `param_groups` are written.
        cycle_min_lr: one number, or one per param group.
        cycle_max_lr: one number, or one per param group.
        decay_lr_rate: after the cycle the lr is
            ``cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size)``.
        cycle_first_step_size: number of steps up.
        cycle_second_step_size: number of steps down; None takes `cycle_first_step_size`.
        cycle_first_stair_count: number of stairs on the way up, 0 for a straight line.
        cycle_second_stair_count: number of stairs on the way down; None takes
            `cycle_first_stair_count`.
        decay_step_size: number of steps of one decay interval, 0 for no decay.
        cycle_momentum: whether momentum is cycled, too.
        cycle_min_mom: momentum at `cycle_max_lr`; one number, or one per param group.
        cycle_max_mom: momentum at `cycle_min_lr`; one number, or one per param group.
        decay_mom_rate: after the cycle momentum is
            ``cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size)``.
        last_batch_iteration: -1 to start; with other values the param groups are left alone.

    Raises:
        SpmdZeroConfigError: a parameter has a wrong type, range or length.
    """

    @checked("OneCycle")
    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer=optimizer, last_batch_iteration=last_batch_iteration)
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        self.first_step_size = cycle_first_step_size
        self.second_step_size = cycle_second_step_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = cycle_second_stair_count
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and self._has_betas()
        if last_batch_iteration == -1:
            self.write_lr(self.min_lrs)
            if self.cycle_momentum:
                self._write_betas(self.min_moms)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group at `last_batch_iteration`."""
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            pairs = zip(self.min_lrs, self.max_lrs, strict=True)
            return [low + (high - low) * scale for low, high in pairs]
        factor = 1 + self.decay_lr_rate * self._decay_intervals()
        return [lr / factor for lr in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group at `last_batch_iteration`; None if they aren't cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            moms = [high - (high - low) * scale for low, high in pairs]
        else:
            factor = 1 + self.decay_mom_rate * self._decay_intervals()
            moms = [mom * factor for mom in self.max_moms]
        return [(mom, _SECOND_BETA) for mom in moms]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the given one, and writes learning rates and betas."""
        super().step(last_batch_iteration)
        moms = self.get_mom()
        if moms is not None:
            self._write_betas([first for first, _ in moms])

    def _write_betas(self, moms: list[float]) -> None:
        for group, mom in zip(self.optimizer.param_groups, moms, strict=False):
            group["betas"] = (mom, _SECOND_BETA)

    def _has_betas(self) -> bool:
        if "betas" in self.optimizer.defaults:
            return True
        warnings.warn(
            "OneCycle leaves the momentum alone: the optimizer has no betas. "
            'Set "cycle_momentum": false to say so.',
            stacklevel=4,
        )
        return False

    def _decay_intervals(self) -> float:
        if not self.decay_step_size:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _scale(self) -> float:
        """The height of lr between its two bounds, 0 to 1."""
        iteration = self.last_batch_iteration + 1
        x = 1.0 + iteration / self.total_size - math.floor(1 + iteration / self.total_size)
        going_up = x <= self.step_ratio
        stairs = self.first_stair_count if going_up else self.second_stair_count
        if not stairs:
            return x / self.step_ratio if going_up else (x - 1) / (self.step_ratio - 1)
        # Use the iteration: x is a little below the peak for some cycles, which is one stair too
        # low.
        place = iteration % self.total_size
        if place <= self.first_step_size:
            return math.floor(place * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - place) * stairs / self.second_step_size) / stairs


class LRRangeTest(DeepSpeedSchedule):
    """Raises lr from `lr_range_test_min_lr` without end, to find where training diverges.

    The policy is that of arXiv 1803.09820, section 4.1. At construction the param groups get the
    lowest lr.

    Args:
        optimizer: its `param_groups` are written.
        lr_range_test_min_lr: one number, or one per param group.
        lr_range_test_step_size: number of steps in which lr grows by `lr_range_test_step_rate`
            times the lowest lr.
        lr_range_test_step_rate: the growth of lr per `lr_range_test_step_size` steps.
        lr_range_test_staircase: whether lr grows once per `lr_range_test_step_size` steps, not at
            each step.
        last_batch_iteration: -1 to start; with other values the param groups are left alone.

    Raises:
        SpmdZeroConfigError: a parameter has a wrong type, range or length.
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
