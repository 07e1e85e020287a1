"""fp16's loss scale on the devices, and the norm without it."""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScales:
    """The loss scale of one step on the devices, as data, so that a change needs no new program.

    Attributes:
        now: the factor in this step's gradients, 0-dim fp32.
        if_applied: the scale after the step if the step is not skipped, 0-dim fp32.
    """

    now: torch.Tensor
    if_applied: torch.Tensor


def unscale(
    scaled: torch.Tensor, *, clip: float, scales: LossScales | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The global norm without the loss scale, and the factor for gradients, or None.

    The formulas are DeepSpeed's (runtime/zero/stage_1_and_2.py, `step` and
    `unscale_and_clip_grads`): the norm is infinity if it is not finite, including NaN.

    Args:
        scaled: the norm of the scaled gradients, 0-dim fp32.
        clip: the largest norm, 0 for no clipping.
        scales: fp16's loss scales, None otherwise.
    """
    norm = torch.where(torch.isfinite(scaled), scaled, torch.full_like(scaled, math.inf))
    if scales is None:
        return norm, _clip_coefficient(scaled, clip) if clip > 0 else None
    coefficient = 1.0 / scales.if_applied
    if clip > 0:
        coefficient = coefficient * _clip_coefficient(scaled / scales.if_applied, clip)
    return norm / scales.now, coefficient


def _clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """DeepSpeed's clip factor, 0-dim fp32: ``1 / max(1, (norm + 1e-6) / max_norm)``.

    A NaN `norm` gives a NaN factor, so that NaN gradients stay visible.
    """
    return 1.0 / torch.clamp((norm + 1e-6) * (1.0 / max_norm), min=1.0)
