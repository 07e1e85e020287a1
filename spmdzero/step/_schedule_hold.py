"""Holds a learning-rate schedule back for skipped steps that the host has not read yet."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldPosition:
    """The position of a schedule after a step, before skipped steps are read.

    Attributes:
        groups: lr and momentum of the param groups at this position.
        passed: lr and momentum at the passed positions, the latest first.
        moved: whether no step has used the numbers of this position yet.
        held: number of steps for which the host's schedule stood still.
    """

    groups: Sequence[dict[str, Any]]
    passed: Sequence[list[dict[str, Any]]]
    moved: bool
    held: int

    def groups_after(self, skipped: int) -> Sequence[dict[str, Any]]:
        """The param groups that the next step uses, if `skipped` steps were skipped so far."""
        debt = skipped - self.held
        if not debt or not self.passed:
            return self.groups
        return self.passed[min(debt - (1 if self.moved else 0), len(self.passed) - 1)]


class ScheduleHold:
    """The numbers of the schedule's last positions, for the devices to choose from.

    A skipped step must not move the schedule on (DeepSpeed, runtime/engine.py, `_take_model_step`),
    but only the devices know whether a step was skipped, and a read would stall every step. So the
    host moves the schedule on, each step uploads the numbers of the last `ROWS` positions, and the
    devices go back by one row for each skipped step for which the schedule was not held back yet.
    When the count of skipped steps is read, the host holds the schedule still for that number of
    steps.

    More than `ROWS - 1` unread skipped steps leave the schedule ahead by the excess. fp16 reads at
    each step whether it was skipped, and owes no steps; but the checkpoint of a run that owes steps
    may be loaded into it, so every schedule has a hold.

    Attributes:
        held: number of steps for which the host's schedule stood still.
        stands: whether the schedule stood still for the latest step.
    """

    def __init__(self) -> None:
        self._numbers: deque[list[float]] = deque(maxlen=ROWS)
        self._groups: deque[list[dict[str, Any]]] = deque(maxlen=ROWS)
        self._moved = True
        self._debt = 0
        self.held = 0
        self.stands = False

    def table(self, numbers: list[float], groups: list[dict[str, Any]]) -> torch.Tensor:
        """`[ROWS, len(numbers)]` fp32: the current numbers, then those of the positions before.

        Args:
            numbers: the numbers of all param groups for the update, at the current position.
            groups: the param groups, whose lr and momentum `positions` returns later.
        """
        if not self._moved:
            self._numbers.popleft()
            self._groups.popleft()
        self._moved = False
        self._numbers.appendleft(numbers)
        self._groups.appendleft([_schedulable(group) for group in groups])
        rows = list(self._numbers)
        return torch.tensor(rows + [rows[-1]] * (ROWS - len(rows)), dtype=torch.float32)

    def advance(self) -> bool:
        """Ends a step; returns whether the schedule moves on, as it owes no step."""
        self.stands = self._debt > 0
        if self.stands:
            self._debt -= 1
            self.held += 1
        else:
            self._moved = True
        return not self.stands

    def stand_still(self) -> None:
        """Ends a step that the host knows was skipped, without moving the schedule."""
        self.stands = True
        self.held += 1

    def settle(self, skipped: int) -> None:
        """Takes note of the count of skipped steps that was read from the devices."""
        self._debt = skipped - self.held

    def state_dict(self) -> dict[str, Any]:
        """The state from which `load_state_dict` continues."""
        return {
            "numbers": [list(row) for row in self._numbers],
            "groups": [[dict(group) for group in row] for row in self._groups],
            "moved": self._moved,
            "debt": self._debt,
            "held": self.held,
        }

    @property
    def owed(self) -> int:
        """Number of steps by which the schedule is ahead, according to the latest `settle`."""
        return self._debt

    def owe(self, steps: int, *, skipped: int) -> None:
        """Notes that the schedule is `steps` ahead of a run that has skipped `skipped` steps."""
        self.held, self._debt = skipped - steps, steps

    @property
    def positions(self) -> Sequence[list[dict[str, Any]]]:
        """The lr and momentum of the param groups at the passed positions, the latest first."""
        return self._groups

    def forget(self) -> None:
        """Drops the passed positions, which belong to a different schedule or optimizer."""
        self._numbers.clear()
        self._groups.clear()
        self._moved = True

    def renumber(self, numbers: Callable[[list[dict[str, Any]]], list[float]]) -> None:
        """Computes the numbers of the passed positions again, from their lr and momentum."""
        self._numbers = deque((numbers(groups) for groups in self._groups), maxlen=ROWS)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self._numbers = deque((list(row) for row in state["numbers"]), maxlen=ROWS)
        self._groups = deque(([dict(g) for g in row] for row in state["groups"]), maxlen=ROWS)
        self._moved, self._debt, self.held = state["moved"], state["debt"], state["held"]

    def groups_now(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The param groups that the next step will use, with the owed steps taken back."""
        back = self._debt - (1 if self._moved else 0)
        if not self._debt or not self._groups:
            return groups
        return self._groups[min(back, len(self._groups) - 1)]

    def position(self, groups: list[dict[str, Any]]) -> HeldPosition:
        """The present position of the schedule, for a later read of skipped steps."""
        return HeldPosition(
            groups=[_schedulable(group) for group in groups],
            passed=tuple(self._groups),
            moved=self._moved,
            held=self.held,
        )


def _schedulable(group: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: group[key] for key in ("lr", "betas", "momentum", "use_muon") if key in group}
    if isinstance(numbers.get("lr"), torch.Tensor):
        # A schedule fills the tensor in place.
        numbers["lr"] = float(numbers["lr"])
    return numbers
