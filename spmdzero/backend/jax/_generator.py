"""The devices' own generator: its state, and the seeds that draws take of it.

A seed is an input of the program that draws, so that the next step's program is the same one. The
draws between two starts of the devices share one and are numbered; then comes the next. A folded
function's draws have a seed of its own, which whoever starts it hands in.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from spmdzero.backend.jax._values import Space, Value
from spmdzero.errors import SpmdZeroRuntimeError

# The state fits an int64, which checkpoints and `position` hold.
_MASK = (1 << 63) - 1
_STRIDE = 0x1E3779B97F4A7C15


@dataclasses.dataclass
class _Draws:
    """Draws that share a seed.

    Attributes:
        name: the state that the seed is of; a negative number for a folded function.
        count: draws so far.
    """

    name: int
    count: int = 0


class Generator:
    """Hands out seeds and numbers; `state` names the seed of the next draws."""

    def __init__(self) -> None:
        self.state = 0
        self._draws: list[_Draws] = [_Draws(0)]
        self._seeds: dict[int, Value] = {}
        self._folds = 0

    def seed(self, state: int) -> None:
        """What is drawn from now on depends on `state` alone."""
        self.state = state & _MASK
        self._draws[0] = _Draws(self.state)

    def draw(self, upload: Callable[[int], Value]) -> tuple[Value, int]:
        """The seed of a draw, 0-dim int32, and its number among the draws of that seed.

        Args:
            upload: the value of a number, for a seed that is not on the devices yet.
        """
        draws = self._draws[-1]
        if draws.name not in self._seeds:
            self._seeds[draws.name] = upload(seed_of(draws.name))
        draws.count += 1
        return self._seeds[draws.name], draws.count - 1

    def advance(self) -> None:
        """Ends the draws of a seed, if there were any: the devices have started."""
        self._seeds = {name: seed for name, seed in self._seeds.items() if name < 0}
        if self._draws[0].count:
            self.seed(self.state + _STRIDE)

    def take(self) -> int:
        """The seed of a folded function that is started now; no other draw gets it."""
        self.advance()
        state = self.state
        self.seed(state + _STRIDE)
        return seed_of(state)

    @contextlib.contextmanager
    def folding(self) -> Iterator[Value]:
        """Inside, draws take the seed that this yields, an input without data."""
        self._folds += 1
        seed, name = Value((), torch.int32, Space.NEUTRAL, stand_in=True), -self._folds
        self._seeds[name] = seed
        self._draws.append(_Draws(name))
        try:
            yield seed
        finally:
            self._draws.pop()
            del self._seeds[name]

    @property
    def position(self) -> tuple[int, int]:
        """Where it is, for `go_to`."""
        return self._draws[-1].name, self._draws[-1].count

    def go_to(self, position: tuple[int, int]) -> None:
        """Draws again from where it was.

        Raises:
            SpmdZeroRuntimeError: it was there in another trace.
        """
        name, count = position
        if (name < 0 or len(self._draws) > 1) and name != self._draws[-1].name:
            raise SpmdZeroRuntimeError(
                "the devices' random generator is set back to where it was in another trace"
            )
        self._draws[-1] = _Draws(name, count)
        if name >= 0:
            self.state = name


def seed_of(state: int) -> int:
    """An int32 that is another for the next state: the finaliser of SplitMix64."""
    wide = (1 << 64) - 1
    bits = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & wide
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & wide
    low = (bits ^ (bits >> 31)) & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


generator = Generator()
