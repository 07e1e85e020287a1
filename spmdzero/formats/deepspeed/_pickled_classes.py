"""What DeepSpeed pickles of its own classes, as plain records: DeepSpeed is not needed to read it.

A record holds what its class's pickle holds, under the same attribute names, and does nothing.
"""

import dataclasses
from typing import Any

import torch


class ZeroStageEnum(int):
    """deepspeed.runtime.zero.config.ZeroStageEnum: 0, 1, 2 or 3."""

    def __reduce__(self) -> Any:
        return ZeroStageEnum, (int(self),)


@dataclasses.dataclass
class FragmentAddress:
    """deepspeed.utils.tensor_fragment.fragment_address: which part of a rank's flat partition.

    Attributes:
        numel: elements.
        start: the first of them in the partition.
    """

    numel: int
    start: int


@dataclasses.dataclass
class LossScaler:
    """deepspeed.runtime.fp16.loss_scaler.LossScaler: a fixed loss scale."""

    cur_scale: float
    dynamic: bool = False


@dataclasses.dataclass
class DynamicLossScaler:
    """deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler: fp16's loss scale and its counters."""

    cur_scale: float
    cur_iter: int
    last_overflow_iter: int
    scale_window: int
    min_scale: float
    delayed_shift: int
    cur_hysteresis: int
    consecutive_hysteresis: bool
    scale_factor: float = 2.0
    raise_error_at_min_scale: bool = True
    dynamic: bool = True
    dtype: torch.dtype = torch.float16


# Each name that DeepSpeed has written such an object under, and what stands for it here.
STAND_INS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
}
