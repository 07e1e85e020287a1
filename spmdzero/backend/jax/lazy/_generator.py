"""The devices' own generator: its state, and the seeds of random draws.

A seed is an input of the program that draws, so that the next step can run the same program. All
draws between two starts of the devices share a seed and are numbered; then the next seed follows.
The draws of a folded function have a seed of their own, which the caller of the function passes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from spmdzero.backend.jax.lazy._values import Space, Value
from spmdzero.errors import SpmdZeroRuntimeError

# The state has to fit an int64, in which checkpoints and `position` store it.
_MASK = (1 << 63) - 1
_STRIDE = 0x1E3779B97F4A7C15


@dataclasses.dataclass
class Draws:
    """Draws that share a seed.

    Attributes:
        name: the state that the seed comes from; a negative number for a given seed.
        count: the number of the next draw.
    """

    name: int
    count: int = 0


class Generator:
    """Returns seeds and numbers of draws; `state` determines the seed of the next draws."""

    def __init__(self) -> None:
        self.state = 0
        self._draws: list[Draws] = [Draws(0)]
        self._seeds: dict[int, Value] = {}

    def seed(self, state: int) -> None:
        """Sets the state, on which alone later draws depend."""
        self.state = state & _MASK
        self._draws[0] = Draws(self.state)

    def draw(self, upload: Callable[[int], Value]) -> tuple[Value, int]:
        """The seed of a draw, 0-dim int32, and its number among the draws of that seed.

        Args:
            upload: makes the value of a number, for a seed that is not on the devices yet.
        """
        draws = self._draws[-1]
        if draws.name not in self._seeds:
            self._seeds[draws.name] = upload(seed_of(draws.name))
        draws.count += 1
        return self._seeds[draws.name], draws.count - 1

    def advance(self) -> None:
        """Moves on to the next seed if this one was used, because the devices have started."""
        self._seeds = {name: seed for name, seed in self._seeds.items() if name < 0}
        if self._draws[0].count:
            self.seed(self.state + _STRIDE)

    def take(self) -> int:
        """The seed for a folded function that starts now; no other draw gets it."""
        self.advance()
        state = self.state
        self.seed(state + _STRIDE)
        return seed_of(state)

    @contextlib.contextmanager
    def folding(self) -> Iterator[Value]:
        """Context in which draws take the yielded seed, an input without data."""
        seed = Value((), torch.int32, Space.NEUTRAL, stand_in=True)
        with self.drawing(seed):
            yield seed

    @contextlib.contextmanager
    def drawing(self, seed: Value, *, first: int = 0) -> Iterator[Draws]:
        """Context in which draws take `seed`, numbered from `first` on; yields their count.

        A position in it is one in every other context with the same seed.
        """
        name = -seed.serial
        known, self._seeds[name] = self._seeds.get(name), seed
        self._draws.append(Draws(name, first))
        try:
            yield self._draws[-1]
        finally:
            self._draws.pop()
            if known is None:
                del self._seeds[name]

    @property
    def position(self) -> tuple[int, int]:
        """The position of the generator, for `go_to`."""
        return self._draws[-1].name, self._draws[-1].count

    def go_to(self, position: tuple[int, int]) -> None:
        """Sets the generator back to a position.

        Raises:
            SpmdZeroRuntimeError: the position belongs to another trace.
        """
        name, count = position
        if (name < 0 or len(self._draws) > 1) and name != self._draws[-1].name:
            raise SpmdZeroRuntimeError(
                "the devices' random generator is set back to where it was in another trace"
            )
        self._draws[-1].name, self._draws[-1].count = name, count
        if name >= 0:
            self.state = name


def seed_of(state: int) -> int:
    """Maps states to int32 seeds that differ for successive states: SplitMix64's finaliser."""
    wide = (1 << 64) - 1
    bits = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & wide
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & wide
    low = (bits ^ (bits >> 31)) & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


generator = Generator()
