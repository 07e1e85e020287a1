"""Writes onto parameters what DeepSpeed's `zero.Init` does, and clients ask for at stage 3.

Source: `Init._convert_to_deepspeed_param` in DeepSpeed's partition_parameters.py.
"""

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

NAMES = ("ds_id", "ds_numel", "ds_shape", "ds_status", "partition_numel")
_ids = itertools.count()


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of a parameter; here each parameter is always AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_partitioned(parameter: torch.Tensor, kept: Sequence[int]) -> None:
    """Sets a parameter's attributes of `NAMES`, as a parameter of a stage 3 engine has them.

    `ds_id` is a number that no other parameter of this process has; `ds_numel` and `ds_shape` are
    of the whole parameter; `ds_status` is AVAILABLE, as a read gives the whole parameter; and
    `partition_numel()` returns the number of elements that one device keeps, with padding.

    Args:
        kept: the shape of the part that a device keeps.
    """
    values: tuple[Any, ...] = (
        next(_ids),
        parameter.numel(),
        parameter.shape,
        ZeroParamStatus.AVAILABLE,
        functools.partial(int, math.prod(kept)),
    )
    vars(parameter).update(zip(NAMES, values, strict=True))
