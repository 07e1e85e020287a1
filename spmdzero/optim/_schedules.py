"""DeepSpeed's warm-up schedules, number for number (DeepSpeed, runtime/lr_schedules.py)."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch.optim import Optimizer

from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError


class _WarmupSchedule(ABC):
    """The counter, the warm-up curve and the writing of `param_groups` of all three schedules."""

    def __init__(
        self,
        *,
        optimizer: Optimizer,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        if not isinstance(warmup_num_steps, int) or warmup_num_steps <= 0:
            raise SpmdZeroConfigError(
                key="scheduler.params.warmup_num_steps",
                value=warmup_num_steps,
                reason="a positive integer is needed",
                fix="Use 1 or more steps, or no scheduler.",
            )
        if warmup_type not in ("log", "linear"):
            raise SpmdZeroConfigError(
                key="scheduler.params.warmup_type",
                value=warmup_type,
                reason="there is no such warm-up curve (DeepSpeed would fall back to log)",
                fix='Use "log" or "linear".',
            )
        self.optimizer = optimizer
        # The log curve divides by log(warmup_num_steps).
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The learning rate of each param group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """The learning rates that were last written to the param groups.

        Raises:
            SpmdZeroUsageError: nothing was written yet (made with a `last_batch_iteration` and
                not stepped since).
        """
        if self._last_lr is None:
            raise SpmdZeroUsageError("get_last_lr() before the first step(): call step() first.")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and write the learning rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write_lr()

    def state_dict(self) -> dict[str, int]:
        """The iteration, under DeepSpeed's name."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Set the iteration; as in DeepSpeed the param groups change at the next `step`."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _write_lr(self) -> None:
        rates = self.get_lr()
        # Not strict: a group that joined later keeps its own lr, as in DeepSpeed.
        for group, lr in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = lr
        self._last_lr = rates

    def _warmup_gamma(self) -> float:
        """How far the warm-up has come, 0 to 1."""
        if self.warmup_type == "linear":
            return self.last_batch_iteration / self.warmup_num_steps
        # Not log(a) / log(b): DeepSpeed multiplies by the inverse, and the last bit differs.
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
            warmup_max_lr = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        if last_batch_iteration == -1:
            self._write_lr()

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
        warmup_min_lr: one number, or one per param group.
        warmup_max_lr: one number, or one per param group.
        warmup_num_steps: length of the warm-up in steps; 1 counts as 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: -1 to start; the param groups are left alone otherwise.

    Raises:
        SpmdZeroConfigError: a parameter of the wrong type, range or length.
    """

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
        self.total_num_steps = _number("total_num_steps", total_num_steps)
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
        warmup_num_steps: length of the warm-up in steps; 1 counts as 2.
        cos_min_ratio: the ratio at `total_num_steps` and after.
        warmup_type: "log" or "linear".
        last_batch_iteration: -1 to start; the param groups are left alone otherwise.

    Raises:
        SpmdZeroConfigError: a parameter of the wrong type or range.
    """

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
        self.total_num_steps = _number("total_num_steps", total_num_steps)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.org_lrs = [group["lr"] for group in optimizer.param_groups]
        _warn_if_all_warmup(total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._write_lr()

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


def _per_group(optimizer: Optimizer, name: str, value: float | Sequence[float]) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [_number(name, value)] * groups
    if len(value) != groups:
        raise SpmdZeroConfigError(
            key=f"scheduler.params.{name}",
            value=value,
            reason=f"{len(value)} values for {groups} param groups",
            fix=f"Give one number, or a list of {groups}.",
        )
    return [_number(name, number) for number in value]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpmdZeroConfigError(
            key=f"scheduler.params.{name}",
            value=value,
            reason=f"a number is needed, this is {type(value).__name__}",
            fix=f"Write {name} as a number, without quotes.",
        )
    return value


def _warn_if_all_warmup(total_num_steps: float, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        warnings.warn(
            f"total_num_steps {total_num_steps} is less than warmup_num_steps {warmup_num_steps}: "
            "the schedule ends before the warm-up does.",
            stacklevel=3,
        )
