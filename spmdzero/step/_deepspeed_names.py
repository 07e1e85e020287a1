"""What scripts ask DeepSpeed's optimizers for besides torch's names."""

import logging
from typing import Any

import torch

from spmdzero.compat.refusals import raise_if_refused
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.precision import LossScaler, NoScale

logger = logging.getLogger("spmdzero")


class NamedAsDeepSpeeds(torch.optim.Optimizer):
    """An optimizer that answers to names of DeepSpeed's, or says why not.

    Attributes:
        scaler: the rules of fp16's loss scale, None without one.
    """

    scaler: LossScaler | None

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

    @property
    def loss_scaler(self) -> LossScaler | NoScale:
        """The scale's rules; without fp16 a scale of 1 that can't be set."""
        return self.scaler or NoScale()

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1.0 but for fp16."""
        return self.scaler.used if self.scaler else 1.0

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._scaler_to_set().cur_scale = value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.scaler is not None and self.scaler.dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """Has the loss multiplied by a number of yours, whatever the scale's rules say.

        Raises:
            SpmdZeroUsageError: without fp16, which alone has a loss scale.
        """
        scaler = self._scaler_to_set()
        if loss_scale != scaler.override:
            logger.info("setting loss scale from %s -> %s", scaler.used, loss_scale)
        scaler.override = float(loss_scale)

    @property
    def custom_loss_scaler(self) -> bool:
        """Whether `override_loss_scale` was called."""
        return self.external_loss_scale is not None

    @property
    def external_loss_scale(self) -> float | None:
        """What it was called with."""
        return self.scaler.override if self.scaler else None

    def needs_scaler(self) -> bool:
        """Whether DeepSpeed refuses a `loss.backward()` that is not scaled: a scale that moves."""
        return self.dynamic_loss_scale or self.custom_loss_scaler

    def _scaler_to_set(self) -> LossScaler:
        if self.scaler is None:
            raise SpmdZeroUsageError("only fp16 has a loss scale, this run has none to set")
        return self.scaler

    def __getattr__(self, name: str) -> Any:
        raise_if_refused("optimizer", name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
