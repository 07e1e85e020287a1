"""Common parts of DeepSpeed's schedules: the counter and the writing of `param_groups`."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch
from torch.optim import Optimizer

from spmdzero.config import SCHEDULES, check_params
from spmdzero.errors import SpmdZeroConfigError, UsageAssertionError, UsageTypeError

P = ParamSpec("P")


class DeepSpeedSchedule(ABC):
    """A schedule with DeepSpeed's interface (DeepSpeed, runtime/lr_schedules.py).

    Args:
        optimizer: its `param_groups` are written.
        last_batch_iteration: -1 to start; with other values the param groups are left alone.
    """

    def __init__(self, *, optimizer: Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The learning rate of each param group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """The learning rates that were last written to the param groups.

        Raises:
            UsageAssertionError: nothing was written yet (the schedule was made with a
                `last_batch_iteration` and not stepped since).
        """
        if self._last_lr is None:
            raise UsageAssertionError("get_last_lr() before the first step(): call step() first.")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the given one, and writes the learning rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self.write_lr(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        """The iteration, under DeepSpeed's name."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Sets the iteration; as in DeepSpeed the param groups change at the next `step`."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def write_lr(self, rates: list[float]) -> None:
        """Writes each param group's learning rate."""
        # zip isn't strict: a group that joined later keeps its own lr, as in DeepSpeed.
        for group, lr in zip(self.optimizer.param_groups, rates, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                # Other code may hold the tensor, and reads the lr there (DeepSpeed, `update_lr`).
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = rates


def checked(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Makes the `__init__` of the schedule `name` check its arguments as the config's are checked.

    Its `optimizer` may be an object that has a torch optimizer as `.optimizer`, as in DeepSpeed.

    Raises:
        SpmdZeroConfigError: an argument has a wrong type or range.
        UsageTypeError: there is no optimizer.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def checking(*args: P.args, **kwargs: P.kwargs) -> None:
            bound = signature.bind(*args, **kwargs)
            _, (first, optimizer), *given = bound.arguments.items()
            check_params(SCHEDULES[name], dict(given), at="scheduler.params")
            bound.arguments[first] = _torch_optimizer(optimizer)
            init(*bound.args, **bound.kwargs)

        return checking

    return decorate


def _torch_optimizer(optimizer: object) -> Optimizer:
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, Optimizer):
            return found
    raise UsageTypeError(
        f"a schedule sets the lr of a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass "
        "the optimizer that initialize returned"
    )


def per_group(optimizer: Optimizer, name: str, value: float | Sequence[float]) -> list[float]:
    """`value` for each param group, or its values if it has one per group.

    Raises:
        SpmdZeroConfigError: the number of values is not that of the groups.
    """
    groups = len(optimizer.param_groups)
    if isinstance(value, int | float):
        return [value] * groups
    if len(value) != groups:
        raise SpmdZeroConfigError(
            key=f"scheduler.params.{name}",
            value=value,
            reason=f"{len(value)} values for {groups} param groups",
            fix=f"Give one number, or a list of {groups}.",
        )
    return list(value)
