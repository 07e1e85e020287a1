"""Random draws from the CPU's generators in a trace of a block."""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from spmdzero.backend._keys import draw_keys
from spmdzero.backend.replica._refused import NotALoopError


@contextlib.contextmanager
def nothing_else_drawn(keys: Callable[[], int]) -> Iterator[None]:
    """Context around a trace, after which the generators are in their former states.

    Args:
        keys: returns how many keys the trace has drawn.

    Raises:
        NotALoopError: the trace drew anything else.
    """
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        draw_keys(keys())
        same = (
            torch.equal(after, torch.get_rng_state())
            and python == random.getstate()
            and repr(numpy) == repr(np.random.get_state())
        )
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        np.random.set_state(numpy)
    if not same:
        raise NotALoopError("a block draws random numbers in Python")
