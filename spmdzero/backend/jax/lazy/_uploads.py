"""Numbers on the host that wait for the program that reads them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.lazy._values import Space, Value

# Larger ones go at once, so that they are on the devices when the program starts.
MOST_BYTES = 1 << 20


class Upload(Value):
    """A global value that goes to the devices when its array is asked for.

    JAX takes longer to prepare a transfer than to send a few numbers, and sends those that a
    program is given with its start.

    Args:
        host: the value, which nobody writes any more.
        dtype: of the tensor.
        sharding: where the devices will have it.
    """

    __slots__ = ("_array", "_host", "_sharding")

    def __init__(self, host: np.ndarray, dtype: torch.dtype, sharding: NamedSharding) -> None:
        super().__init__(host.shape, dtype, Space.GLOBAL)
        self._sharding = sharding
        self._host: np.ndarray | None = host

    @property
    def array(self) -> Any:  # type: ignore[override]
        """The array on the devices."""
        if self._host is not None:
            put([self])
        return self._array

    @array.setter
    def array(self, array: Any) -> None:
        self._array, self._host = array, None

    @property
    def sharding(self) -> Any:
        """Where the devices have it, or will have it."""
        return self._sharding

    @property
    def waits(self) -> bool:
        """Whether it is still on the host."""
        return self._host is not None

    @property
    def given(self) -> Any:
        """The array that a program is given, or the numbers that it takes to the devices."""
        return self._array if self._host is None else self._host


def put(values: Sequence[Value]) -> None:
    """Sends those of `values` that wait, all at once."""
    waiting = [v for v in values if type(v) is Upload and v.waits]
    if not waiting:
        return
    with wide_numbers():
        arrays = jax.device_put([v._host for v in waiting], [v._sharding for v in waiting])
    for value, array in zip(waiting, arrays, strict=True):
        value.array = array


def given(values: Sequence[Value]) -> list[Any]:
    """Lists what a program is given for each value: an array, or numbers on the host."""
    return [value.given if type(value) is Upload else value.array for value in values]
