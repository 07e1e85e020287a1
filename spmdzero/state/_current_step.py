"""Tracks the progress of the current step."""

import dataclasses

import torch


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
