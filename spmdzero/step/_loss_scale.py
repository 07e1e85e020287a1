"""fp16's loss scale under the names of DeepSpeed's optimizers."""

import logging

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.precision import LossScaler, NoScale

logger = logging.getLogger("spmdzero")


class LossScaled(torch.optim.Optimizer):
    """An optimizer whose gradients may carry a loss scale, under DeepSpeed's names.

    Attributes:
        scaler: the scale's rules, None without a scale.
    """

    scaler: LossScaler | None

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
