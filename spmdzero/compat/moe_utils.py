"""Answers `deepspeed.moe.utils` for models without experts: scripts with an option for them ask it.

`deepspeed.moe.layer.MoE` is refused, so no module is one and no parameter is an expert's.
"""

from typing import Any

import torch
from torch import nn

from spmdzero.compat.refusals import refuse

__all__ = [
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether the model has DeepSpeed's experts, and how many: none."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed would take the parameter for an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer has experts' parameters."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: int | float = 178956971,
) -> list[dict[str, Any]]:
    """Returns the groups as a list, as DeepSpeed does if no parameter is an expert's.

    Raises:
        SpmdZeroUsageError: a parameter is an expert's.
        ValueError: what is given are no groups.
    """
    if isinstance(param_groups, dict):
        groups = [param_groups]
    elif isinstance(param_groups, (list, tuple)):
        groups = list(param_groups)
    else:
        raise ValueError(f"Unknown param group type of {type(param_groups)}")
    for group in groups:
        group["params"] = list(group["params"])
        if any(is_moe_param(parameter) for parameter in group["params"]):
            refuse("moe.layer")
    return groups
