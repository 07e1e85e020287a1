"""Asks models and groups of an optimizer about experts: `deepspeed.moe.utils`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spmdzero.compat.moe._layer import MoE

__all__ = [
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether the model has DeepSpeed's experts, and how many its first layer of them has."""
    found = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return found is not None, 0 if found is None else found.num_experts


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether the parameter is an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer has experts' parameters."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: int | float | None = 178956971,
) -> list[dict[str, Any]]:
    """Puts experts' parameters into groups of their own, after those given.

    Each has the numbers of the group that it comes from, ``"moe": True``, the name of the experts'
    group, and `max_group_size` elements at most. They are trained as all others.

    Raises:
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
    names = {p.group_name for group in groups for p in group["params"] if is_moe_param(p)}
    added = list[dict[str, Any]]()
    for group in groups:
        for name in sorted(names):
            mine = [p for p in group["params"] if is_moe_param(p) and p.group_name == name]
            for part in _parts(mine, max_group_size):
                added.append({**group, "name": name, "moe": True, "params": part})
        group["params"] = [p for p in group["params"] if not is_moe_param(p)]
    return groups + added


def _parts(
    parameters: list[torch.Tensor], most: int | float | None
) -> Iterator[list[torch.Tensor]]:
    """Yields parameters in order, `most` elements at a time; None for all at once."""
    part, size = list[torch.Tensor](), 0
    for parameter in parameters:
        if part and most is not None and size + parameter.numel() > most:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += parameter.numel()
    if part:
        yield part
