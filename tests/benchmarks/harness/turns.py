"""Ways to do the same work that take turns, so that a slow second hits all."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from spmdzero.backend import runtime

Way: TypeAlias = Callable[[int], Callable[[], object]]
"""Prepares a turn, by its number; returns what is timed."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """Seconds of each timed turn.

    Attributes:
        host: CPU time of the thread that launches.
        whole: until the devices were done.
    """

    host: list[float] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)


def take_turns(ways: Mapping[str, Way], *, turns: int, warm_up: int) -> dict[str, Taken]:
    """Times `turns` of each way, after `warm_up` more that are not counted."""
    taken = {name: Taken() for name in ways}
    names = list(ways)
    for turn in range(-warm_up, turns):
        # Whoever goes first in a turn has the caches of the other's batch.
        names.reverse()
        for name in names:
            act = ways[name](warm_up + turn)
            runtime.wait()
            began, began_host = time.perf_counter(), time.thread_time()
            # Kept, so that dropping it is not timed.
            kept = act()
            host = time.thread_time() - began_host
            runtime.wait()
            whole = time.perf_counter() - began
            del kept, act
            if turn >= 0:
                taken[name].host.append(host)
                taken[name].whole.append(whole)
    return taken
