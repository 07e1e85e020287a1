"""fp16's loss scale under the names of DeepSpeed's optimizers."""

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.precision import LossScaler


class LossScaled(torch.optim.Optimizer):
    """An optimizer whose gradients may carry a loss scale, under DeepSpeed's names.

    Attributes:
        loss_scaler: the scale's rules, None without a scale.
    """

    loss_scaler: LossScaler | None

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1.0 but for fp16."""
        return self.loss_scaler.cur_scale if self.loss_scaler else 1.0

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self.loss_scaler is None:
            raise SpmdZeroUsageError("only fp16 has a loss scale, this run has none to set")
        self.loss_scaler.cur_scale = value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.loss_scaler is not None and self.loss_scaler.dynamic
