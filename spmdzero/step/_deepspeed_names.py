"""DeepSpeed's names on optimizers, which scripts use besides torch's names."""

import logging
from typing import Any

import torch

from spmdzero.compat.refusals import raise_if_refused
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.precision import LossScaler, NoScale

logger = logging.getLogger("spmdzero")


class NamedAsDeepSpeeds(torch.optim.Optimizer):
    """An optimizer with names of DeepSpeed's optimizers; it refuses others with a reason.

    Attributes:
        scaler: the rules of fp16's loss scale, None without one.
        given: the optimizer that was passed to `initialize`, None for the config's.
        configured: the type of the config's optimizer, such as ``"AdamW"``, None for a passed one.
    """

    scaler: LossScaler | None
    given: torch.optim.Optimizer | None = None
    configured: str | None = None

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

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before backward; 1.0 except in fp16."""
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
        """Sets the factor of the loss, regardless of the scale's rules.

        Raises:
            SpmdZeroUsageError: without fp16, as only fp16 has a loss scale.
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
        """The scale passed to `override_loss_scale`, or None."""
        return self.scaler.override if self.scaler else None

    def needs_scaler(self) -> bool:
        """Whether DeepSpeed refuses an unscaled `loss.backward()`, as the loss scale can change."""
        return self.dynamic_loss_scale or self.custom_loss_scaler

    def _scaler_to_set(self) -> LossScaler:
        if self.scaler is None:
            raise SpmdZeroUsageError("only fp16 has a loss scale, this run has none to set")
        return self.scaler

    def __getattr__(self, name: str) -> Any:
        raise_if_refused("optimizer", name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
