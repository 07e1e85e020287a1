"""Counts the progress of training and of its current step, and logs skipped steps."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

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


@dataclasses.dataclass
class CurrentStep:
    """The progress of a step by the three calls and `train_batch`; only its methods change it.

    Attributes:
        losses: losses of the micro-batches so far, 0-dim on the device.
        ran_forward: whether a forward of the engine with gradients ran since the latest step ended;
            the forwards of all micro-batches may run before the first backward.
        direct_backward: in fp16, the user's line of the latest backward pass through an output of
            the module called without its engine, until the gradients are taken over.
        backward_done: whether this micro-batch has had its backward, and its program has not been
            started.
        applied: whether the latest `step()` was a boundary that no known overflow skipped.
    """

    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ran_forward: bool = False
    direct_backward: str | None = None
    backward_done: bool = False
    applied: bool = False

    def pass_forward(self) -> None:
        """Takes note of a forward with gradients."""
        self.ran_forward = True

    def pass_backward(self, loss: torch.Tensor, *, pending: bool) -> None:
        """Takes note of a backward pass, whose program has been started unless it is pending."""
        self.losses.append(loss)
        self.backward_done = pending

    def pass_launch(self) -> None:
        """Takes note that the pending program was started."""
        self.backward_done = False

    def pass_direct_backward(self, line: str) -> None:
        """Takes note of a backward pass without the engine, at the user's `line`."""
        self.direct_backward = line

    def take_direct_backward(self) -> str | None:
        """Returns the line of the latest backward pass without the engine, and forgets it."""
        line, self.direct_backward = self.direct_backward, None
        return line

    def begin_end(self) -> None:
        """Takes note that `step()` was called, which has applied no update yet."""
        self.applied = False

    def end_micro_batch(self, *, boundary: bool) -> None:
        """Takes note that a micro-batch, and at a boundary the step, was started on the devices."""
        self.backward_done = self.applied = False
        self.ran_forward &= not boundary

    def pass_update(self, *, applied: bool) -> None:
        """Takes note whether the step changed the parameters, as far as the host knows."""
        self.applied = applied

    def end(self) -> None:
        """Forgets the losses of a step that is over."""
        self.losses = []

    def restart(self) -> None:
        """Forgets the progress of a step that will be repeated."""
        self.backward_done, self.losses = False, []

    def resume(self, losses: list[torch.Tensor], *, backward_done: bool) -> None:
        """Continues from a checkpoint in the middle of a step."""
        self.backward_done, self.losses = backward_done, losses
