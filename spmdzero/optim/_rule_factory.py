"""Makes an update rule of an optimizer in the config, or of a torch optimizer."""

from collections.abc import Mapping
from typing import Any

import torch

from spmdzero._logging import log_once
from spmdzero.config import OPTIMIZERS
from spmdzero.optim._adafactor import Adafactor, TorchAdafactor
from spmdzero.optim._adagrad import Adagrad
from spmdzero.optim._adam import Adam
from spmdzero.optim._any_class import elementwise_rule
from spmdzero.optim._bitsandbytes import rule_of_bitsandbytes
from spmdzero.optim._lamb import Lamb
from spmdzero.optim._lion import Lion
from spmdzero.optim._named import (
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from spmdzero.optim._rule import UpdateRule
from spmdzero.optim._sgd import SGD

DEEPSPEED_OPTIMIZERS = tuple(OPTIMIZERS)
"""The names that stand for rules, and not for classes of torch.optim that need a proof."""

# DeepSpeed 0.19.8, runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS, by the config's names.
_TESTED_NAMES = ("adam", "adamw", "adagrad", "lion", "muon")
_EIGHT_BITS = "8bit"
_TESTED_CLASSES = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    DeepSpeedCPUAdam,
    FusedAdam,
    DeepSpeedCPULion,
    FusedLion,
)


def is_tested(optimizer: str | torch.optim.Optimizer) -> bool:
    """Whether DeepSpeed runs an optimizer under ZeRO without `zero_allow_untested_optimizer`.

    Args:
        optimizer: its name in the config, or the user's own.
    """
    if isinstance(optimizer, str):
        # DeepSpeed knows no name of bitsandbytes, so that its list says nothing of them.
        return optimizer.lower() in _TESTED_NAMES or optimizer.endswith(_EIGHT_BITS)
    return type(optimizer) in _TESTED_CLASSES


def rule_from_config(type: str, params: Mapping[str, Any]) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule and the param group defaults for `{"type": ..., "params": ...}`.

    The meaning is DeepSpeed's (runtime/engine.py, `_configure_basic_optimizer`): "Adam" is AdamW
    unless `adam_w_mode` is false; "AdamW" always is. `torch_adam` chooses an implementation there,
    but here it only changes AdamW's default weight decay: torch's 0.01 instead of FusedAdam's 0.
    "Muon" has a rule for each half of the parameters: see `muon_groups`.

    Args:
        type: one of `DEEPSPEED_OPTIMIZERS` except "Muon".
        params: as checked by `load_config`.
    """
    rule = _rule(type, params)
    model = OPTIMIZERS[type].model_fields
    group = {
        name: params.get(name, model[name].default if name in model else default)
        for name, default in rule.defaults.items()
    }
    if isinstance(rule, SGD):
        group["momentum"] = params.get("momentum", 0.0)
    if isinstance(rule, Adam) and params.get("torch_adam"):
        del group["bias_correction"]
        group["weight_decay"] = params.get("weight_decay", 1e-2 if rule.decoupled else 0.0)
        # FusedAdam keeps the JSON's list, torch's class makes it a tuple: `get_mom` shows them.
        group["betas"] = tuple(group["betas"])
    return rule, group


def _rule(type: str, params: Mapping[str, Any]) -> UpdateRule:
    corrected = bool(params.get("bias_correction", True))
    if type.endswith(_EIGHT_BITS):
        least = params.get("min_8bit_size", OPTIMIZERS[type].model_fields["min_8bit_size"].default)
        if "Lion" in type:
            return Lion(eight_bits_from=least)
        return Adam(decoupled=True, bias_correction=True, eight_bits_from=least)
    if type in ("Adam", "AdamW"):
        decoupled = type == "AdamW" or bool(params.get("adam_w_mode", True))
        return Adam(decoupled=decoupled, bias_correction=corrected)
    if type == "SGD":
        nesterov = bool(params.get("nesterov", False))
        return SGD(momentum=params.get("momentum", 0.0) != 0, nesterov=nesterov)
    if type == "Lamb":
        inside = bool(params.get("eps_inside_sqrt", False))
        return Lamb(bias_correction=corrected, eps_inside_sqrt=inside)
    return {"Adagrad": Adagrad, "Lion": Lion}[type]()


def rules_from_torch(optimizer: torch.optim.Optimizer, *, device: torch.device) -> list[UpdateRule]:
    """The rule of each param group that has the effect of `optimizer.step`.

    Known by their arithmetic are torch.optim.Adam, AdamW, SGD, Adagrad and Adafactor themselves (a
    subclass may compute something else), FusedAdam, FusedLamb and FusedLion, transformers'
    Adafactor, and Adam, AdamW and Lion of bitsandbytes. For any other class the rule runs its own
    `step` on shards, see `elementwise_rule`.

    Args:
        optimizer: over any tensors; it has taken no step. At least one of its groups has
            parameters; a group without any gets the rule of one that has.
        device: where the class is proven, and will run.

    Raises:
        SpmdZeroConfigError: a class that can't be proven elementwise, an option that the rule
            does not have, a tensor as lr, or param groups that differ in more than numbers.
    """
    groups = optimizer.param_groups
    first = next(group for group in groups if group["params"])
    rule = _known_rule(optimizer, first)
    if rule is None:
        of_first = elementwise_rule(optimizer, first, device=device)
        return [
            elementwise_rule(optimizer, group, device=device)
            if group["params"] and group is not first
            else of_first
            for group in groups
        ]
    for group in groups:
        if group["params"]:
            rule.validate(group)
    return [rule] * len(groups)


def _known_rule(optimizer: torch.optim.Optimizer, first: Mapping[str, Any]) -> UpdateRule | None:
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return Adam(decoupled=first["decoupled_weight_decay"], bias_correction=True)
    if isinstance(optimizer, FusedAdam):
        return Adam(decoupled=optimizer.adam_w_mode, bias_correction=first["bias_correction"])
    if isinstance(optimizer, FusedLamb):
        return Lamb(
            bias_correction=first["bias_correction"], eps_inside_sqrt=optimizer.eps_inside_sqrt
        )
    if isinstance(optimizer, FusedLion):
        return Lion()
    if type(optimizer) is torch.optim.SGD:
        return SGD(momentum=first["momentum"] != 0, nesterov=first["nesterov"])
    if type(optimizer) is torch.optim.Adagrad:
        return Adagrad()
    if type(optimizer) is torch.optim.Adafactor:
        return TorchAdafactor()
    cls = type(optimizer)
    if (cls.__module__, cls.__name__) == ("transformers.optimization", "Adafactor"):
        choices = ("scale_parameter", "relative_step", "warmup_init")
        for group in optimizer.param_groups if first["relative_step"] else ():
            if group["lr"] is None:
                group["lr"] = 0.0
                log_once(
                    "Adafactor's relative_step finds its own learning rate at each step: groups "
                    "show 0.0, and a schedule has no effect"
                )
        return Adafactor(
            first_moment=first["beta1"] is not None, **{name: first[name] for name in choices}
        )
    return rule_of_bitsandbytes(optimizer)
