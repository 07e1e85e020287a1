"""Checks whether the random numbers that a trace drew can be drawn without tracing."""

import random
from collections.abc import Collection

import numpy as np
import torch

from spmdzero.backend._keys import draw_keys
from spmdzero.backend._named_states import NamedStates
from spmdzero.backend.pure._impure import ImpureError


class GeneratorWatch:
    """The state of the CPU's generators when a trace began, to which they return when it ends."""

    def __init__(self) -> None:
        self._others = _others()
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
        self._state, self._named = torch.get_rng_state(), NamedStates.now()

    def __enter__(self) -> "GeneratorWatch":
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._state)
        self._named.put_back()
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def places_of(self, keys: Collection[int], *, who: str) -> list[int]:
        """The index of each draw's key among the keys that `draw_keys` would draw.

        Checkpointing draws some keys again, from a generator that it has set back.

        Args:
            keys: all that the trace drew, in their order.
            who: what was traced, in reasons.

        Raises:
            ImpureError: the trace drew other numbers too.
        """
        if _others() != self._others:
            raise ImpureError(f"{who} draws from Python's or numpy's random numbers")
        if self._named.were_drawn_from():
            raise ImpureError(f"{who} draws from a named random state")
        after = torch.get_rng_state()
        torch.set_rng_state(self._state)
        drawn: list[int] = []
        for key in keys:
            if key not in drawn:
                drawn += (int(new) for new in draw_keys(1))
        same = torch.equal(after, torch.get_rng_state())
        torch.set_rng_state(after)
        if not same or not {*keys} <= {*drawn}:
            raise ImpureError(
                f"{who} draws from torch's CPU generator in Python, by which it may choose its way"
            )
        return [drawn.index(key) for key in keys]


def _others() -> tuple[object, ...]:
    numbers = np.random.get_state(legacy=False)
    return random.getstate(), repr(numbers), numbers["state"]["key"].tobytes()
