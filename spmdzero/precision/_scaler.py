"""The loss scale of fp16 training."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from spmdzero.config import Fp16Config
from spmdzero.errors import SpmdZeroRuntimeError

logger = logging.getLogger("spmdzero")


@dataclasses.dataclass(kw_only=True)
class LossScaler:
    """Static or dynamic loss scale, rule for rule DeepSpeed's.

    Source: runtime/fp16/loss_scaler.py, and for stage 0 `_update_scale` of fp16/fused_optimizer.py
    and fp16/unfused_optimizer.py.

    Attributes:
        cur_scale: what the loss is multiplied by before backward.
        dynamic: whether `update_scale` changes it.
        scale_window: steps without overflow after which it doubles.
        min_scale: it is never halved below this.
        at_stage_0: whether there is no ZeRO: each overflow halves it, whatever the hysteresis, and
            one at `min_scale` is no error.
        delayed_shift: overflows that are needed before it halves, DeepSpeed's `hysteresis`.
        consecutive_hysteresis: whether any step without overflow refills the hysteresis.
        cur_hysteresis: overflows left before it halves.
        cur_iter: steps seen, skipped ones included.
        last_overflow_iter: the step of the latest overflow, -1 for none.
    """

    cur_scale: float
    dynamic: bool
    scale_window: int = 1000
    min_scale: float = 1.0
    at_stage_0: bool = False
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    cur_hysteresis: int = 2
    cur_iter: int = 0
    last_overflow_iter: int = -1

    @classmethod
    def from_config(cls, fp16: Fp16Config, *, stage: int) -> "LossScaler":
        """The scaler that the section ``fp16`` asks for at a ZeRO stage; a `loss_scale` of 0 is
        dynamic.
        """
        if fp16.loss_scale:
            return cls(cur_scale=float(fp16.loss_scale), dynamic=False)
        return cls(
            cur_scale=float(2**fp16.initial_scale_power),
            dynamic=True,
            scale_window=fp16.loss_scale_window,
            min_scale=fp16.min_loss_scale,
            at_stage_0=stage == 0,
            delayed_shift=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            cur_hysteresis=fp16.hysteresis,
        )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a saved scaler's attributes; others of its keys are left alone.

        Which rule it follows is this run's: `at_stage_0` stays.
        """
        for item in dataclasses.fields(self):
            if item.name in saved and item.name != "at_stage_0":
                setattr(self, item.name, saved[item.name])

    def scale_if_applied(self) -> float:
        """The scale after the coming step, if that one has no overflow.

        DeepSpeed updates the scale before it unscales the gradients (runtime/zero/
        stage_1_and_2.py, `step`), so a step at which the scale doubles divides by the doubled one.
        """
        return self.cur_scale * 2 if self.dynamic and self._window_is_over() else self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Takes note of one step.

        Raises:
            SpmdZeroRuntimeError: an overflow at the smallest scale, under ZeRO.
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
            if not self.at_stage_0:
                raise SpmdZeroRuntimeError(text)
            logger.warning("%s", text)
            return
        before, self.cur_scale = self.cur_scale, max(self.cur_scale / 2, self.min_scale)
        logger.info("gradient overflow: loss scale %g -> %g", before, self.cur_scale)
