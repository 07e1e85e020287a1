"""Clipping by the global gradient norm."""

import torch


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by, 0-dim fp32: ``1 / max(1, (norm + 1e-6) / max_norm)``.

    DeepSpeed's formula (runtime/zero/stage_1_and_2.py, `unscale_and_clip_grads`). A `norm` that
    is not a number gives a coefficient that is none, so that NaN gradients stay visible.
    """
    return 1.0 / torch.clamp((norm + 1e-6) * (1.0 / max_norm), min=1.0)
