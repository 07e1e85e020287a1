"""Param groups: from the config, from `model_parameters`, or from the user's torch optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

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


@dataclasses.dataclass(frozen=True)
class Members:
    """Which tensors a param group may hold.

    Attributes:
        names: parameter of the model -> its name.
        renewed: parameter from before the move to the devices -> the one that replaced it.
    """

    names: Mapping[torch.Tensor, str]
    renewed: Mapping[torch.Tensor, torch.Tensor]

    def of(self, group: Mapping[str, Any]) -> list[torch.Tensor]:
        """The parameters of one group, as they are now."""
        given = group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        for parameter in given:
            if not isinstance(parameter, torch.Tensor):
                raise SpmdZeroUsageError(
                    f"a param group holds a {type(parameter).__name__} where a parameter belongs: "
                    "pass model.parameters(), not model.named_parameters()"
                )
        return [self.renewed.get(parameter, parameter) for parameter in given]

    def check(self, groups: list[dict[str, Any]]) -> None:
        """Raises SpmdZeroUsageError for a stranger, or a parameter that is in two groups."""
        seen: set[torch.Tensor] = set()
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter not in self.names:
                    raise SpmdZeroUsageError(
                        f"param group {index} holds a tensor of shape {list(parameter.shape)} "
                        "that is not a parameter of the model"
                    )
                if parameter in seen:
                    raise SpmdZeroUsageError(f"{self.names[parameter]} is in two param groups")
                seen.add(parameter)


def groups_from_torch(optimizer: torch.optim.Optimizer, members: Members) -> Groups:
    """The groups of a user's Adam, AdamW or SGD; the same dicts, so that schedules reach them."""
    if optimizer.state:
        raise SpmdZeroUsageError(
            "the optimizer has taken steps already, and its states are not sharded. "
            "Hand a fresh one to initialize"
        )
    rule = rule_from_torch(optimizer)
    for group in optimizer.param_groups:
        group["params"] = members.of(group)
    members.check(optimizer.param_groups)
    return Groups(rule=rule, groups=optimizer.param_groups, client=optimizer)


def groups_from_config(
    config: OptimizerConfig, given: list[Any] | None, members: Members
) -> Groups:
    """The config's optimizer over `given` parameters or groups, or all trainable parameters."""
    rule, defaults = rule_from_config(config.type, config.params)
    if given is None:
        given = [parameter for parameter in members.names if parameter.requires_grad]
    if not given:
        raise SpmdZeroUsageError(
            "there is nothing to train: model_parameters is empty (a generator that was used up?) "
            "or every parameter is frozen"
        )
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    complete = [{**defaults, **group, "params": members.of(group)} for group in groups]
    members.check(complete)
    return Groups(rule=rule, groups=complete)
