"""`DeepSpeedOptimizer`: an optimizer with the names of DeepSpeed's, beside torch's."""

import logging
from typing import Any

import torch

from spmdzero.compat.refusals import raise_if_refused
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.precision import LossScaler, NoScale
from spmdzero.step._optimizer import ZeroOptimizer

logger = logging.getLogger("spmdzero")


class DeepSpeedOptimizer(ZeroOptimizer):
    """A `ZeroOptimizer` with names of DeepSpeed's optimizers; it refuses others with a reason."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This optimizer itself, as it wraps no other; groups and states are its own."""
        return self

    @optimizer.setter
    def optimizer(self, value: None) -> None:
        # Older transformers assign None to free DeepSpeed's optimizer after an evaluation.
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
                # The tensor is filled in place, as other code may hold it.
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def destroy(self) -> None:
        """Does nothing: the last reference to the engine frees the states."""

    @property
    def loss_scaler(self) -> LossScaler | NoScale:
        """The rules of the loss scale; without fp16 a scale of 1 that can't be set."""
        return self.scaler or NoScale()

    cur_scale = ZeroOptimizer.loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """Sets the factor of the loss, regardless of the scale's rules.

        Raises:
            SpmdZeroUsageError: without fp16, as only fp16 has a loss scale.
        """
        scaler = self.scaler_to_set()
        if loss_scale != scaler.override:
            logger.info("setting loss scale from %s -> %s", scaler.used, loss_scale)
        scaler.override = float(loss_scale)

    @property
    def custom_loss_scaler(self) -> bool:
        """Whether `override_loss_scale` was called."""
        return self.external_loss_scale is not None

    @property
    def external_loss_scale(self) -> float | None:
        """The scale passed to `override_loss_scale`, or None."""
        return self.scaler.override if self.scaler else None

    def needs_scaler(self) -> bool:
        """Whether DeepSpeed refuses an unscaled `loss.backward()`, as the loss scale can change."""
        return self.dynamic_loss_scale or self.custom_loss_scaler

    def __getattr__(self, name: str) -> Any:
        raise_if_refused("optimizer", name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
