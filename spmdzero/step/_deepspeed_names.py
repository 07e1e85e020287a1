"""What scripts ask DeepSpeed's optimizers for besides torch's names and the loss scale."""

from typing import Any

import torch

from spmdzero.compat.refusals import raise_if_refused
from spmdzero.errors import SpmdZeroUsageError


class NamedAsDeepSpeeds(torch.optim.Optimizer):
    """An optimizer that answers to names of DeepSpeed's, or says why not."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Itself: no other optimizer is inside, groups and states are its own."""
        return self

    @optimizer.setter
    def optimizer(self, value: None) -> None:
        # Older transformers let go of DeepSpeed's so, of an engine that only evaluates.
        if value is not None:
            raise SpmdZeroUsageError(
                "engine.optimizer.optimizer = ...: the step is compiled for the optimizer that "
                "initialize was given. Pass another to a new initialize(optimizer=...)"
            )

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
