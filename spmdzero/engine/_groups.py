"""Param groups: from the config, from `model_parameters`, or from the user's torch optimizer."""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero._names import did_you_mean
from spmdzero.config import OptimizerConfig
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError, UntestedOptimizerError
from spmdzero.optim import (
    DEEPSPEED_OPTIMIZERS,
    Slot,
    UpdateRule,
    is_tested,
    kept_in_fp32,
    muon_groups,
    rule_from_config,
    rules_from_torch,
)

logger = logging.getLogger("spmdzero")

ParameterGroups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """The parameters that are trained, and how.

    Attributes:
        rules: the update rule of each group.
        groups: torch param groups with every number that their rules need.
        name: the optimizer's name in messages.
        tested: whether DeepSpeed lists it among the optimizers that it tests with ZeRO.
        client: the user's own optimizer, which shares `groups`.
        in_fp32: parameters whose states rest in fp32, whatever their rule says.
    """

    rules: list[UpdateRule]
    groups: list[dict[str, Any]]
    name: str
    tested: bool
    client: torch.optim.Optimizer | None = None
    in_fp32: frozenset[torch.Tensor] = frozenset()

    @property
    def slots(self) -> tuple[str, ...]:
        """The optimizer slots of all rules together."""
        return tuple(dict.fromkeys(slot for rule in self.rules for slot in rule.slots))

    def slots_by_parameter(self) -> dict[torch.Tensor, tuple[Slot, ...]]:
        """The slots of each parameter."""
        found = dict[torch.Tensor, tuple[Slot, ...]]()
        for rule, group in zip(self.rules, self.groups, strict=True):
            for p in group["params"]:
                slots = rule.slots_of(tuple(p.shape))
                if p in self.in_fp32:
                    slots = tuple(dataclasses.replace(slot, eight_bits=False) for slot in slots)
                found[p] = slots
        return found

    def require_slots(self, moments: Mapping[str, str]) -> None:
        """Refuses a name in ``spmd.moments`` that is no slot of the optimizer, or rests in 8 bits.

        Raises:
            SpmdZeroConfigError: the optimizer has no such slot.
        """
        if not moments:
            return
        coded = {
            slot.name for own in self.slots_by_parameter().values() for slot in own
            if slot.eight_bits
        }  # fmt: skip
        for name, dtype in moments.items():
            if name in coded:
                raise SpmdZeroConfigError(
                    key=f"spmd.moments.{name}",
                    value=dtype,
                    reason=f"{self.name} keeps it in 8 bits",
                    fix="Leave it out, or name the optimizer without 8bit.",
                )
            if name not in self.slots:
                there = f"It has {', '.join(self.slots)}." if self.slots else "Leave it out."
                raise SpmdZeroConfigError(
                    key=f"spmd.moments.{name}",
                    value=dtype,
                    reason=f"{self.name} keeps no state {name!r} for the elements of a parameter",
                    fix=f"{did_you_mean(name, self.slots)} {there}".strip(),
                )

    def require_tested(self, *, stage: int, allowed: bool) -> None:
        """Refuses the optimizers that DeepSpeed refuses with ZeRO (runtime/engine.py).

        Raises:
            UntestedOptimizerError: the optimizer is not in DeepSpeed's list, and not `allowed`.
        """
        if stage > 0 and not self.tested and not allowed:
            raise UntestedOptimizerError(
                key="zero_allow_untested_optimizer",
                value=False,
                reason=f"{self.name} is not among the optimizers that DeepSpeed tests with ZeRO, "
                "which are Adam, AdamW, Adagrad, Lion and Muon",
                fix='Write "zero_allow_untested_optimizer": true to use it all the same.',
            )


@dataclasses.dataclass(frozen=True)
class Members:
    """The tensors that a param group may hold.

    Attributes:
        model: the module that has the parameters.
        renewed: parameter from before the move to the devices -> the one that replaced it.
    """

    model: nn.Module
    renewed: Mapping[torch.Tensor, torch.Tensor]

    @functools.cached_property
    def names(self) -> Mapping[torch.Tensor, str]:
        """Parameter of the model -> its name."""
        return {p: name for name, p in self.model.named_parameters()}

    def trainable(self) -> list[Any]:
        """The parameters that require a gradient."""
        return [parameter for parameter in self.names if parameter.requires_grad]

    def of(self, group: Mapping[str, Any]) -> list[torch.Tensor]:
        """The parameters of one group; those moved to the devices replace the given ones."""
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
        """Raises SpmdZeroUsageError for a tensor of no model, or a parameter in two groups."""
        seen: set[torch.Tensor] = set()
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter not in self.names:
                    raise SpmdZeroUsageError(
                        f"param group {index} holds a tensor of shape {list(parameter.shape)} "
                        "that is not a parameter of the model: an engine trains what its model "
                        "holds. Leave it out of the optimizer, or make what it belongs to (such as "
                        "a loss that has weights) a part of the model that you hand over"
                    )
                if parameter in seen:
                    raise SpmdZeroUsageError(f"{self.names[parameter]} is in two param groups")
                seen.add(parameter)


def find_groups(
    config: OptimizerConfig | None,
    optimizer: Any,
    model_parameters: ParameterGroups | None,
    members: Members,
    *,
    device: torch.device,
) -> Groups | None:
    """The groups that `initialize`'s arguments and config train; None without an optimizer.

    Raises:
        SpmdZeroConfigError: the optimizer can't run on shards, or its parameters are wrong.
        SpmdZeroUsageError: there is nothing to train, a tensor that is no parameter of the model,
            or an optimizer that has taken steps.
    """
    given = list(model_parameters) if model_parameters is not None else None
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(given or members.trainable())
    if optimizer is not None:
        if config is not None:
            logger.info("the optimizer passed to initialize is used, not the config's")
        return _from_torch(optimizer, members, device=device)
    return _from_config(config, given, members, device=device) if config else None


def _from_torch(
    optimizer: torch.optim.Optimizer, members: Members, *, device: torch.device
) -> Groups:
    """The groups of a user's torch optimizer, as the same dicts, so that schedules reach them."""
    # Adagrad fills its state when it is made, with the step at 0.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise SpmdZeroUsageError(
            "the optimizer has taken steps already, and its states are not sharded. "
            "Hand a fresh one to initialize"
        )
    optimizer.state.clear()
    if not any(group["params"] for group in optimizer.param_groups):
        raise SpmdZeroUsageError(
            "there is nothing to train: no param group of the optimizer has a parameter"
        )
    # Groups without parameters stay. DeepSpeed drops them, which moves the later groups away from
    # the lr that a schedule has for each group by its index.
    rules = rules_from_torch(optimizer, device=device)
    in_fp32 = [members.renewed.get(p, p) for p in kept_in_fp32(optimizer, placed=members.names)]
    for group in optimizer.param_groups:
        group["params"] = members.of(group)
    members.check(optimizer.param_groups)
    return Groups(
        rules=rules,
        groups=optimizer.param_groups,
        name=type(optimizer).__name__,
        tested=is_tested(optimizer),
        client=optimizer,
        in_fp32=frozenset(in_fp32),
    )


def _from_config(
    config: OptimizerConfig, given: list[Any] | None, members: Members, *, device: torch.device
) -> Groups:
    """The config's optimizer over `given` parameters or groups, or all trainable parameters."""
    given = members.trainable() if given is None else given
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": members.of(group)} for group in groups]
    if not any(group["params"] for group in groups):
        raise SpmdZeroUsageError(
            "there is nothing to train: model_parameters is empty (a generator that was used up?) "
            "or every parameter is frozen"
        )
    members.check(groups)
    if config.type not in DEEPSPEED_OPTIMIZERS:
        return _torch_class(config, groups, members, device=device)
    if config.type == "Muon":
        pairs = list(muon_groups(groups, members.model, config.params))
    else:
        rule, defaults = rule_from_config(config.type, config.params)
        pairs = [(rule, {**defaults, **group}) for group in groups]
    return Groups(
        rules=[rule for rule, _ in pairs],
        groups=[group for _, group in pairs],
        name=config.type,
        tested=is_tested(config.type),
    )


def _torch_class(
    config: OptimizerConfig, groups: list[Any], members: Members, *, device: torch.device
) -> Groups:
    try:
        optimizer = getattr(torch.optim, config.type)(groups, **config.params)
    except (TypeError, ValueError) as error:
        raise SpmdZeroConfigError(
            key="optimizer.params",
            value=dict(config.params),
            reason=f"torch.optim.{config.type} refuses them: {error}",
            fix="See the documentation of the class.",
        ) from error
    return dataclasses.replace(_from_torch(optimizer, members, device=device), client=None)
