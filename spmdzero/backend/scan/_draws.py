"""What a trace of a block draws from the CPU's generators."""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from spmdzero.backend._keys import draw_keys
from spmdzero.backend.replica._refused import NotALoopError


@contextlib.contextmanager
def nothing_else_drawn(keys: Callable[[], int]) -> Iterator[None]:
    """Around a trace: the generators are left as they were.

    Args:
        keys: how many keys of draws the trace has drawn.

    Raises:
        NotALoopError: it drew something else.
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
