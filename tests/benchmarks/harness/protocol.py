"""What a peer must offer inside its process, and what the process answers."""

import dataclasses
import statistics
from typing import Any, ClassVar

import torch
from torch import nn


class Peer:
    """One way to train, made with the workload and the options of its candidate.

    Making it starts process groups and devices, which is not timed.
    """

    rows: slice = slice(None)
    """The rows of a micro-batch that this process works on."""
    host_is_apart: ClassVar[bool] = True
    """Whether the thread that calls `step` leaves the arithmetic to other threads."""

    def place(self, model: nn.Module) -> None:
        """Brings model and optimizer states to where they are trained; timed as initialisation."""
        raise NotImplementedError

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        """Trains one step; returns its loss in any form."""
        raise NotImplementedError

    def read(self, loss: Any) -> float:
        """The mean loss over all rows; waits until the step is done everywhere."""
        raise NotImplementedError

    def programs(self) -> int:
        """Programs compiled so far."""
        return 0

    def wire_bytes(self, inputs: torch.Tensor, targets: torch.Tensor) -> int | None:
        """Bytes that one device sends in a step, by the compiled program; None without one."""
        return None

    def peak_memory(self) -> int | None:
        """The most bytes of the device's memory in use at once so far; None where nothing tells."""
        return None

    def close(self) -> None:
        """Ends what `__init__` started."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one process measured.

    Attributes:
        init_seconds: until model and states were where they are trained.
        warm_up_seconds: of each warm-up step.
        step_seconds: of each timed step, until its loss was read.
        host_seconds: of each timed step, CPU time of the thread that traces and launches; empty
            where that thread does the arithmetic too.
        losses: mean loss of every step, warm-up included.
        wire_bytes: what one device sends in a step; None where nothing tells.
        peak_rss: highest resident memory, bytes; of all ranks together.
        unread_seconds: of a step where no loss was read before the last was started; None without.
        peak_memory: highest use of the device's memory, bytes; None where nothing tells.
    """

    init_seconds: float
    warm_up_seconds: list[float]
    step_seconds: list[float]
    host_seconds: list[float]
    losses: list[float]
    wire_bytes: int | None
    peak_rss: int
    unread_seconds: float | None = None
    peak_memory: int | None = None

    @property
    def compile_seconds(self) -> float:
        """What the warm-up took beyond as many median steps."""
        usual = len(self.warm_up_seconds) * statistics.median(self.step_seconds)
        return max(0.0, sum(self.warm_up_seconds) - usual)
