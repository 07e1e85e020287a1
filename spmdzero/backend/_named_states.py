"""Named random states, from which a part of a forward draws and a second run of it draws again.

torch.utils.checkpoint sets generators back before it runs a function again, and a trace of a
forward is taken back with what it drew. A tracker of named states has its states beside the
generators, so they are set back here.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch


class Tracker(Protocol):
    """Holds named states of the CPU generator.

    Attributes:
        states_: name -> state; each fork replaces its own.
        seeds_: the seeds from which they started.
    """

    states_: dict[str, torch.Tensor]
    seeds_: set[int]


_trackers: weakref.WeakSet[Tracker] = weakref.WeakSet()


def follow(tracker: Tracker) -> None:
    """Sets the states of `tracker` back wherever a generator's is, for as long as it lives."""
    _trackers.add(tracker)


@dataclasses.dataclass(frozen=True, eq=False)
class NamedStates:
    """The states of all trackers at one time."""

    _states: list[tuple[Tracker, dict[str, torch.Tensor], set[int]]]

    @classmethod
    def now(cls) -> "NamedStates":
        """The present states."""
        return cls([(each, dict(each.states_), set(each.seeds_)) for each in _trackers])

    def put_back(self) -> None:
        """Sets the trackers back to these states."""
        for tracker, states, seeds in self._states:
            tracker.states_, tracker.seeds_ = dict(states), set(seeds)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context in which draws start from these states; the present ones are back at its end."""
        before = NamedStates.now()
        self.put_back()
        try:
            yield
        finally:
            before.put_back()

    def were_drawn_from(self) -> bool:
        """Whether a state has changed since."""
        return any(
            states.keys() != tracker.states_.keys()
            or not all(torch.equal(state, tracker.states_[name]) for name, state in states.items())
            for tracker, states, _ in self._states
        )


def noted_on(state: torch.Tensor) -> torch.Tensor:
    """Returns `state`, a device's random state, which takes the named ones along.

    torch's own checkpoint asks a device for its state, and sets it before it runs a function again.
    """
    state.named_states = NamedStates.now()  # pyrefly: ignore[missing-attribute]
    return state


def put_back_of(state: torch.Tensor) -> None:
    """Sets the trackers back to what `noted_on` has noted on a device's random state."""
    named = getattr(state, "named_states", None)
    if isinstance(named, NamedStates):
        named.put_back()
