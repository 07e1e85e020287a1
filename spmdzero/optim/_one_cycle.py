"""DeepSpeed's one-cycle schedule, number for number (runtime/lr_schedules.py)."""

import math
import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from spmdzero.optim._schedule import DeepSpeedSchedule, checked, per_group

_SECOND_BETA = 0.99


class OneCycle(DeepSpeedSchedule):
    """The lr from `cycle_min_lr` to `cycle_max_lr` and back, then decaying; momentum inversely.

    The policy is of arXiv 1803.09820. Momentum is the first of `betas`; the second becomes 0.99,
    as in DeepSpeed. An optimizer without `betas` keeps its momentum, with a warning. Until the
    first `step` the param groups hold `cycle_min_lr` and `cycle_min_mom`.

    Args:
        optimizer: its `param_groups` are written.
        cycle_min_lr: one number, or one per param group.
        cycle_max_lr: one number, or one per param group.
        decay_lr_rate: after the cycle the lr is
            ``cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size)``.
        cycle_first_step_size: steps up.
        cycle_second_step_size: steps down; None takes `cycle_first_step_size`.
        cycle_first_stair_count: stairs on the way up, 0 for a straight line.
        cycle_second_stair_count: stairs on the way down; None takes `cycle_first_stair_count`.
        decay_step_size: steps of one decay interval, 0 for no decay.
        cycle_momentum: whether momentum is cycled at all.
        cycle_min_mom: momentum at `cycle_max_lr`; one number, or one per param group.
        cycle_max_mom: momentum at `cycle_min_lr`; one number, or one per param group.
        decay_mom_rate: after the cycle momentum is
            ``cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size)``.
        last_batch_iteration: -1 to start; the param groups are left alone otherwise.

    Raises:
        SpmdZeroConfigError: a parameter of the wrong type, range or length.
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
        """Go to the next iteration, or to the one given, and write learning rates and betas."""
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
        """The lr's height between its two bounds, 0 to 1."""
        iteration = self.last_batch_iteration + 1
        x = 1.0 + iteration / self.total_size - math.floor(1 + iteration / self.total_size)
        going_up = x <= self.step_ratio
        stairs = self.first_stair_count if going_up else self.second_stair_count
        if not stairs:
            return x / self.step_ratio if going_up else (x - 1) / (self.step_ratio - 1)
        # The iteration is asked: x is a little below the peak for some cycles, one stair too low.
        place = iteration % self.total_size
        if place <= self.first_step_size:
            return math.floor(place * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - place) * stairs / self.second_step_size) / stairs
