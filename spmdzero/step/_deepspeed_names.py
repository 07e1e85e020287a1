"""What scripts ask DeepSpeed's optimizers for besides torch's names and the loss scale."""

from typing import Any

import torch

from spmdzero.compat.refusals import raise_if_refused


class NamedAsDeepSpeeds(torch.optim.Optimizer):
    """An optimizer that answers to names of DeepSpeed's, or says why not."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Itself: no other optimizer is inside, groups and states are its own."""
        return self

    def get_lr(self) -> float:
        """The learning rate of the first param group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every param group."""
        for group in self.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                # It stays the tensor that somebody else holds.
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def destroy(self) -> None:
        """Nothing: the states go with the last reference to the engine."""

    def __getattr__(self, name: str) -> Any:
        raise_if_refused("optimizer", name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
