"""Records in the place of DeepSpeed's own classes in pickles: reading needs no DeepSpeed.

A record has the attributes that its class's pickle holds, and no behaviour.
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
    """deepspeed.utils.tensor_fragment.fragment_address: a part of a rank's flat partition.

    Attributes:
        numel: number of elements.
        start: index of the first element in the partition.
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


# Name under which DeepSpeed has written such an object -> the record for it.
STAND_INS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
}
