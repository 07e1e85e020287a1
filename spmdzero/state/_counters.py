"""Counts the progress of training, and logs skipped steps."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("spmdzero")


@dataclasses.dataclass
class Counters:
    """DeepSpeed's counters.

    Attributes:
        micro_steps: number of micro-batches passed.
        global_steps: number of gradient accumulation boundaries passed, including skipped updates.
        global_samples: number of samples of all devices, counted at boundaries.
        skipped_steps: number of steps that an overflow skipped, if that is known without a read.
        counted_from: `micro_steps` when the accumulation steps were last changed.
        backwards: number of `engine.backward` calls since the last step.
        in_step: number of micro-batches passed since the last boundary, also if the caller sets
            boundaries.
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    counted_from: int = 0
    backwards: int = 0
    in_step: int = 0

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continues from the counters of a checkpoint."""
        for item in dataclasses.fields(self):
            setattr(self, item.name, int(saved.get(item.name, 0)))

    def pass_backward(self) -> None:
        """Counts a backward pass."""
        self.backwards += 1

    def pass_micro_batch(self) -> None:
        """Counts a micro-batch."""
        self.micro_steps += 1
        self.in_step += 1

    def pass_step(self, *, samples: int, skipped: bool) -> None:
        """Counts a gradient accumulation boundary and the samples of its step."""
        self.global_steps += 1
        self.global_samples += samples
        self.skipped_steps += skipped
        self.backwards = self.in_step = 0

    def restart_step(self) -> None:
        """Forgets the micro-batches of a step that will be repeated."""
        self.micro_steps -= self.in_step
        self.backwards = self.in_step = 0


class SkipLog:
    """Logs each skipped step once, at the first read of the count; reads nothing itself."""

    def __init__(self) -> None:
        self._told = self._since = 0

    def tell(
        self, skipped: int, *, step: int, since: int | None = None, level: int = logging.WARNING
    ) -> None:
        """Takes note of the count of skipped steps that was just read.

        Args:
            skipped: the count.
            step: number of steps at this read.
            since: number of steps at the read before, None for that of the latest call.
            level: level of the log line.
        """
        new, last = skipped - self._told, step - 1
        first = self._since if since is None else since
        if new > 0:
            where = (
                f"step {last} was" if first >= last else f"{new} of steps {first} to {last} were"
            )
            logger.log(
                level,
                "%s skipped: the gradient was not finite, parameters and optimizer states are as "
                "they were",
                where,
            )
        self.restart(skipped, step=step)

    def restart(self, skipped: int, *, step: int) -> None:
        """Continues from a checkpoint with these counts."""
        self._told, self._since = skipped, step
