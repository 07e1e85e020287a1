"""Protocol of what a backend knows of its devices' memory."""

from collections.abc import Sequence
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """The memory of this process's devices, and what compiled programs take of it."""

    def limit(self) -> int | None:
        """Bytes that programs may use on the device that has the fewest; None if nobody says."""

    def of_program(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Compiles the pending program that computes `tensors`, and starts nothing.

        Returns the bytes of its inputs on a device, and the most that are in use there at once,
        inputs included, as the compiler says.
        """
