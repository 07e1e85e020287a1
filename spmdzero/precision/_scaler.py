"""The loss scale of fp16 training."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from spmdzero.config import Fp16Config
from spmdzero.errors import SpmdZeroRuntimeError, SpmdZeroUsageError

logger = logging.getLogger("spmdzero")
_OF_THIS_RUN = ("at_stage_0", "raise_error_at_min_scale", "scale_factor")


@dataclasses.dataclass(kw_only=True)
class LossScaler:
    """A static or dynamic loss scale that follows DeepSpeed's rules exactly.

    Source: runtime/fp16/loss_scaler.py, and for stage 0 `_update_scale` of fp16/fused_optimizer.py
    and fp16/unfused_optimizer.py.

    Attributes:
        cur_scale: factor of the loss before backward.
        dynamic: whether `update_scale` changes it.
        scale_window: number of steps without overflow after which it doubles.
        min_scale: it is never halved below this.
        at_stage_0: whether there is no ZeRO: each overflow halves it, whatever the hysteresis.
        raise_error_at_min_scale: whether an overflow at `min_scale` ends the run.
        scale_factor: the factor by which it is halved and doubled.
        override: the scale set by DeepSpeed's `override_loss_scale`: the loss is multiplied by it,
            while the rules go on for `cur_scale`. None for `cur_scale`.
        delayed_shift: number of overflows before it halves, DeepSpeed's `hysteresis`.
        consecutive_hysteresis: whether any step without overflow refills the hysteresis.
        cur_hysteresis: number of overflows left before it halves.
        cur_iter: number of steps so far, with skipped ones.
        last_overflow_iter: the step of the latest overflow, -1 for none.
    """

    cur_scale: float
    dynamic: bool
    scale_window: int = 1000
    min_scale: float = 1.0
    at_stage_0: bool = False
    raise_error_at_min_scale: bool = True
    scale_factor: float = 2.0
    override: float | None = None
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    cur_hysteresis: int = 2
    cur_iter: int = 0
    last_overflow_iter: int = -1

    @classmethod
    def from_config(cls, fp16: Fp16Config, *, stage: int) -> "LossScaler":
        """The scaler for the section ``fp16`` at a ZeRO stage; a `loss_scale` of 0 is dynamic."""
        if fp16.loss_scale:
            return cls(cur_scale=float(fp16.loss_scale), dynamic=False)
        return cls(
            cur_scale=float(2**fp16.initial_scale_power),
            dynamic=True,
            scale_window=fp16.loss_scale_window,
            min_scale=fp16.min_loss_scale,
            at_stage_0=stage == 0,
            raise_error_at_min_scale=stage > 0,
            delayed_shift=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            cur_hysteresis=fp16.hysteresis,
        )

    @property
    def loss_scale(self) -> float:
        """`cur_scale`, under DeepSpeed's name."""
        return self.cur_scale

    @property
    def used(self) -> float:
        """The factor of the loss: the override, or `cur_scale`."""
        return self.cur_scale if self.override is None else self.override

    def used_if_applied(self) -> float:
        """The value of `used` after the coming step, if that has no overflow."""
        return self.scale_if_applied() if self.override is None else self.override

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over a saved scaler's attributes; other keys are ignored.

        The rules that it follows come from this run's config and script, and stay.
        """
        for item in dataclasses.fields(self):
            if item.name in saved and item.name not in _OF_THIS_RUN:
                setattr(self, item.name, saved[item.name])

    def scale_if_applied(self) -> float:
        """The scale after the coming step, if that has no overflow.

        DeepSpeed updates the scale before it unscales the gradients (runtime/zero/
        stage_1_and_2.py, `step`), so a step at which the scale doubles divides by the doubled one.
        """
        grows = self.dynamic and self._window_is_over()
        return self.cur_scale * self.scale_factor if grows else self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale after one step.

        Raises:
            SpmdZeroRuntimeError: an overflow at the smallest scale, if that has to raise.
        """
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis or self._window_is_over():
                self.cur_hysteresis = self.delayed_shift
            self.cur_scale = self.scale_if_applied()
        self.cur_iter += 1

    def _window_is_over(self) -> bool:
        stable = self.cur_iter - self.last_overflow_iter - 1
        return stable > 0 and stable % self.scale_window == 0

    def _shrink(self) -> None:
        if not self.at_stage_0 and self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            return
        if self.cur_scale == self.min_scale:
            text = (
                f"Current loss scale already at minimum ({self.min_scale:g}) - cannot decrease "
                "scale anymore: every step overflows. Look for a NaN in the model, lower the "
                "learning rate, or train in bf16"
            )
            if self.raise_error_at_min_scale:
                raise SpmdZeroRuntimeError(text)
            logger.warning("%s", text)
            return
        before, self.cur_scale = (
            self.cur_scale,
            max(self.cur_scale / self.scale_factor, self.min_scale),
        )
        logger.info("gradient overflow: loss scale %g -> %g", before, self.cur_scale)


class NoScale:
    """Takes a scaler's place without fp16: a scale of 1 that can't be set.

    Attributes:
        dynamic: False.
    """

    dynamic = False

    @property
    def loss_scale(self) -> float:
        """1.0."""
        return 1.0

    cur_scale = loss_scale

    def __setattr__(self, name: str, value: object) -> None:
        # Its rules, such as raise_error_at_min_scale, may be set, because they rule nothing.
        if name in ("cur_scale", "loss_scale"):
            raise SpmdZeroUsageError(
                f"loss_scaler.{name} = {value!r}: only fp16 has a loss scale, this run has none to "
                "set"
            )
        super().__setattr__(name, value)
