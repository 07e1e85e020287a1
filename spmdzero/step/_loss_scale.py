"""fp16's loss scale in the optimizer: on the devices, in the gradients, and to be read."""

import dataclasses
import math

import torch

from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import clip_coefficient
from spmdzero.precision import LossScaler
from spmdzero.step._numbers import scale_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScales:
    """The loss scale of one step on the devices, as data: a Python number would be a program.

    Attributes:
        now: 0-dim fp32, by which this step's gradients are too large.
        if_applied: 0-dim fp32, the scale after the step if that is not skipped.
    """

    now: torch.Tensor
    if_applied: torch.Tensor

    @classmethod
    def upload(cls, scaler: LossScaler, mesh: DeviceMesh) -> "LossScales":
        """The two scales of `scaler`."""
        now, if_applied = mesh.place(scale_numbers(scaler), role="scales").unbind()
        return cls(now=now, if_applied=if_applied)


def unscale(
    scaled: torch.Tensor, *, clip: float, scales: LossScales | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The global norm without the loss scale, and what gradients are to be multiplied by.

    DeepSpeed's formulas (runtime/zero/stage_1_and_2.py, `step` and `unscale_and_clip_grads`): the
    norm is infinity when it is not finite, NaN included.

    Args:
        scaled: the norm of the gradients as they are, 0-dim fp32.
        clip: the largest norm, 0 for any.
        scales: fp16's, None otherwise.
    """
    norm = torch.where(torch.isfinite(scaled), scaled, torch.full_like(scaled, math.inf))
    if scales is None:
        return norm, clip_coefficient(scaled, clip) if clip > 0 else None
    coefficient = 1.0 / scales.if_applied
    if clip > 0:
        coefficient = coefficient * clip_coefficient(scaled / scales.if_applied, clip)
    return norm / scales.now, coefficient


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
