"""Holding a learning-rate schedule back for skipped steps that nobody has read from the devices."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldPosition:
    """Where a schedule stands after a step, whatever is read of skipped steps later.

    Attributes:
        groups: lr and momentum of the param groups there.
        passed: those at the positions passed, the latest first.
        moved: whether it stands at a position of which no step had the numbers yet.
        held: steps for which the host's schedule stood still.
    """

    groups: Sequence[dict[str, Any]]
    passed: Sequence[list[dict[str, Any]]]
    moved: bool
    held: int

    def groups_after(self, skipped: int) -> Sequence[dict[str, Any]]:
        """The param groups as the next step sees them, if so many steps were skipped so far."""
        debt = skipped - self.held
        if not debt or not self.passed:
            return self.groups
        return self.passed[min(debt - (1 if self.moved else 0), len(self.passed) - 1)]


class ScheduleHold:
    """The numbers of the schedule's last positions, for the devices to choose from.

    A skipped step must not move the schedule on (DeepSpeed, runtime/engine.py,
    `_take_model_step`), but whether a step was skipped is known on the devices only, and reading
    it would stall every step. So the host moves on, each step uploads the numbers of the last
    `ROWS` positions, and the devices take the row that is as far back as there are skipped steps
    which the schedule was not held back for yet. When somebody reads the count of skipped steps,
    the host makes up for them by standing still.

    More than `ROWS - 1` skipped steps that nobody looks at leave the schedule that much ahead.

    fp16 reads at each step whether it was skipped, and owes nothing; but the checkpoint of a run
    that does owe steps may be loaded into it, so every schedule has one of these.

    Attributes:
        held: steps for which the host's schedule stood still.
        stands: whether it did so for the latest step.
    """

    def __init__(self) -> None:
        self._numbers: deque[list[float]] = deque(maxlen=ROWS)
        self._groups: deque[list[dict[str, Any]]] = deque(maxlen=ROWS)
        self._moved = True
        self._debt = 0
        self.held = 0
        self.stands = False

    def table(self, numbers: list[float], groups: list[dict[str, Any]]) -> torch.Tensor:
        """`[ROWS, len(numbers)]` fp32: the current numbers first, then those of positions before.

        Args:
            numbers: what the update needs of all param groups, at the current position.
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
        """Ends a step; returns whether the schedule is to be moved on, or owes a step."""
        self.stands = self._debt > 0
        if self.stands:
            self._debt -= 1
            self.held += 1
        else:
            self._moved = True
        return not self.stands

    def stand_still(self) -> None:
        """Ends a step of which the host knows that it was skipped, without moving the schedule."""
        self.stands = True
        self.held += 1

    def settle(self, skipped: int) -> None:
        """Takes note of the count of skipped steps, as read from the devices."""
        self._debt = skipped - self.held

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""
        return {
            "numbers": [list(row) for row in self._numbers],
            "groups": [[dict(group) for group in row] for row in self._groups],
            "moved": self._moved,
            "debt": self._debt,
            "held": self.held,
        }

    @property
    def owed(self) -> int:
        """Steps by which the schedule is ahead, as far as `settle` was told."""
        return self._debt

    def owe(self, steps: int, *, skipped: int) -> None:
        """Leaves the schedule where it is, `steps` ahead of a run that has skipped `skipped`."""
        self.held, self._debt = skipped - steps, steps

    @property
    def positions(self) -> Sequence[list[dict[str, Any]]]:
        """The lr and momentum of the param groups at the positions passed, the latest first."""
        return self._groups

    def forget(self) -> None:
        """Drops the positions passed: they are those of another schedule or optimizer."""
        self._numbers.clear()
        self._groups.clear()
        self._moved = True

    def renumber(self, numbers: Callable[[list[dict[str, Any]]], list[float]]) -> None:
        """Computes the numbers of the positions passed anew, from the lr and momentum there."""
        self._numbers = deque((numbers(groups) for groups in self._groups), maxlen=ROWS)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self._numbers = deque((list(row) for row in state["numbers"]), maxlen=ROWS)
        self._groups = deque(([dict(g) for g in row] for row in state["groups"]), maxlen=ROWS)
        self._moved, self._debt, self.held = state["moved"], state["debt"], state["held"]

    def groups_now(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The param groups as the next step will see them, the owed steps taken back."""
        back = self._debt - (1 if self._moved else 0)
        if not self._debt or not self._groups:
            return groups
        return self._groups[min(back, len(self._groups) - 1)]

    def position(self, groups: list[dict[str, Any]]) -> HeldPosition:
        """Where the schedule stands now, for whoever reads later which steps were skipped."""
        return HeldPosition(
            groups=[_schedulable(group) for group in groups],
            passed=tuple(self._groups),
            moved=self._moved,
            held=self.held,
        )


def _schedulable(group: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: group[key] for key in ("lr", "betas", "momentum", "use_muon") if key in group}
    if isinstance(numbers.get("lr"), torch.Tensor):
        # A schedule fills it in place.
        numbers["lr"] = float(numbers["lr"])
    return numbers
