"""Param groups: from the config, from `model_parameters`, or from the user's torch optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.config import OptimizerConfig
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule, rule_from_config, rule_from_torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """What is trained, and how.

    Attributes:
        rule: the update.
        groups: torch param groups with every number that the rule needs.
        client: the user's own optimizer, which shares `groups`.
    """

    rule: UpdateRule
    groups: list[dict[str, Any]]
    client: torch.optim.Optimizer | None = None


def groups_from_torch(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> Groups:
    """The groups of a user's Adam, AdamW or SGD; the same dicts, so that schedules reach them."""
    if optimizer.state:
        raise SpmdZeroUsageError(
            "the optimizer has taken steps already, and its states are not sharded. "
            "Hand a fresh one to initialize"
        )
    rule = rule_from_torch(optimizer)
    _check_members(optimizer.param_groups, names)
    return Groups(rule=rule, groups=optimizer.param_groups, client=optimizer)


def groups_from_config(
    config: OptimizerConfig, given: list[Any] | None, names: Mapping[nn.Parameter, str]
) -> Groups:
    """The config's optimizer over `given` parameters or groups, or all trainable parameters."""
    rule, defaults = rule_from_config(config.type, config.params)
    if not given:
        given = [p for p in names if p.requires_grad]
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    complete = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, nn.Parameter) else list(members)
        complete.append({**defaults, **group, "params": members})
    _check_members(complete, names)
    return Groups(rule=rule, groups=complete)


def _check_members(groups: list[dict[str, Any]], names: Mapping[nn.Parameter, str]) -> None:
    seen: set[nn.Parameter] = set()
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise SpmdZeroUsageError(
                    f"param group {index} holds a tensor of shape {list(parameter.shape)} that is "
                    "not a parameter of the model"
                )
            if parameter in seen:
                raise SpmdZeroUsageError(f"{names[parameter]} is in two param groups")
            seen.add(parameter)
