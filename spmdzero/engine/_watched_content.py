"""Objects that change in place, which their container doesn't show: tensors, arrays, generators."""

import operator
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spmdzero.backend import arrays

# More elements are data, which is not copied: a tensor that big is followed by its version only,
# a numpy array not at all.
_MOST_ELEMENTS = 1 << 16


class WatchedContent:
    """What is in an object, and was in it when this was made.

    Args:
        name: in messages.
        stamp: reads what changes with the content, to be compared.
        restore: puts the content back.
    """

    def __init__(
        self, name: str, stamp: Callable[[], object], restore: Callable[[], object]
    ) -> None:
        self._name, self._stamp, self._restore = name, stamp, restore
        self._seen = stamp()

    def change(self) -> str | None:
        """What differs, in words."""
        return None if self._stamp() == self._seen else f"{self._name} was written"

    def restore(self) -> None:
        """Undoes the change."""
        self._restore()
        self._seen = self._stamp()


def content_of(name: str, value: Any) -> WatchedContent | None:
    """Watches `value` if it is a tensor, a numpy array or a generator of random numbers."""
    if isinstance(value, torch.Tensor):
        # A tensor made in inference mode has no version, and can't be written outside of it.
        if value.is_inference():
            return None
        if arrays.is_mine(value):
            # A clone costs nothing as long as neither is written.
            before = value.detach().clone()
            return WatchedContent(
                name,
                lambda: arrays.write_stamp(value),
                lambda: arrays.set_value(value, before),
            )
        if value.device.type != "cpu":
            return None
        kept = value.detach().clone() if value.numel() <= _MOST_ELEMENTS else None
        return WatchedContent(
            name,
            # Nobody sees a write through `.data`, or into memory that is shared with numpy.
            lambda: value._version,
            lambda: None if kept is None else value.detach().copy_(kept),
        )
    if isinstance(value, np.ndarray):
        if value.size > _MOST_ELEMENTS:
            return None
        before = value.copy()
        return WatchedContent(name, value.tobytes, lambda: np.copyto(value, before))
    for kind, get, put in _GENERATORS:
        if isinstance(value, kind):
            return _generator(name, value, get, put)
    return None


def _generator(
    name: str, value: Any, get: Callable[[Any], Any], put: Callable[[Any, Any], None]
) -> WatchedContent:
    state = get(value)
    return WatchedContent(name, lambda: pickle.dumps(get(value)), lambda: put(value, state))


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], None]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (np.random.Generator, operator.attrgetter("bit_generator.state"), _set_bits),
    (
        torch.Generator,
        lambda generator: generator.get_state().numpy(),
        lambda generator, state: generator.set_state(torch.from_numpy(state)),
    ),
)
