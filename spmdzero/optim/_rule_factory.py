"""From an optimizer in the config, or a torch optimizer, to an update rule."""

from collections.abc import Mapping
from typing import Any

import torch

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._adam import Adam
from spmdzero.optim._names import did_you_mean
from spmdzero.optim._rule import UpdateRule
from spmdzero.optim._sgd import SGD

_ADAM_PARAMS = {"lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam"}
# Beyond the arithmetic these name torch's and DeepSpeed's kernels, which have no meaning here.
_FUSED_ADAM_PARAMS = _ADAM_PARAMS | {"bias_correction", "set_grad_none"}
_TORCH_PARAMS = {"maximize", "differentiable", "foreach", "fused"}
_TORCH_ADAM_PARAMS = _ADAM_PARAMS | _TORCH_PARAMS | {"capturable"}
_SGD_PARAMS = {"lr", "momentum", "dampening", "weight_decay", "nesterov"} | _TORCH_PARAMS
_REFUSED = ("amsgrad", "maximize", "differentiable")


def rule_from_config(type: str, params: Mapping[str, Any]) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule and the param group defaults that `{"type": ..., "params": ...}` stands for.

    The meaning is DeepSpeed's (runtime/engine.py, `_configure_basic_optimizer`): names are
    case-insensitive; "Adam" is AdamW unless `adam_w_mode` is false; "AdamW" always is.
    `torch_adam` chooses an implementation there. All it changes here is AdamW's default weight
    decay: torch's 0.01 instead of FusedAdam's 0.

    Raises:
        SpmdZeroConfigError: an unknown type or parameter, or a value that can't be honoured.
    """
    name = type.lower()
    if name in ("adam", "adamw"):
        rule, group = _adam(name, params)
    elif name == "sgd":
        rule, group = _sgd(params)
    else:
        raise SpmdZeroConfigError(
            key="optimizer.type",
            value=type,
            reason="there is no sharded update of this name",
            fix=did_you_mean(type, known=("Adam", "AdamW", "SGD")),
        )
    rule.validate(group | {option: params.get(option, False) for option in _REFUSED})
    return rule, group


def rule_from_torch(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """The rule that does what `optimizer.step` would, over every one of its param groups.

    Raises:
        SpmdZeroConfigError: any class but torch.optim.Adam, AdamW and SGD themselves (a subclass
            may compute something else), an option that the rule does not have, a tensor as lr,
            or param groups that differ in more than numbers.
    """
    first = optimizer.param_groups[0]
    rule: UpdateRule
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        rule = Adam(decoupled=first["decoupled_weight_decay"], bias_correction=True)
    elif type(optimizer) is torch.optim.SGD:
        rule = SGD(momentum=first["momentum"] != 0, nesterov=first["nesterov"])
    else:
        cls = type(optimizer)
        raise SpmdZeroConfigError(
            key="optimizer",
            value=f"{cls.__module__}.{cls.__qualname__}",
            reason="its update can't be sharded without knowing its arithmetic",
            fix="Use exactly torch.optim.Adam, torch.optim.AdamW or torch.optim.SGD, "
            "not a subclass.",
        )
    for group in optimizer.param_groups:
        rule.validate(group)
    return rule


def _adam(name: str, params: Mapping[str, Any]) -> tuple[Adam, dict[str, Any]]:
    torch_adam = bool(params.get("torch_adam", False))
    _check_names(params, known=_TORCH_ADAM_PARAMS if torch_adam else _FUSED_ADAM_PARAMS)
    rule = Adam(
        decoupled=name == "adamw" or bool(params.get("adam_w_mode", True)),
        bias_correction=bool(params.get("bias_correction", True)),
    )
    defaults = rule.defaults
    if torch_adam:
        del defaults["bias_correction"]
        defaults["weight_decay"] = 1e-2 if rule.decoupled else 0.0
    group = _fill(defaults, params)
    if isinstance(group["betas"], list):
        group["betas"] = tuple(group["betas"])
    return rule, group


def _sgd(params: Mapping[str, Any]) -> tuple[SGD, dict[str, Any]]:
    _check_names(params, known=_SGD_PARAMS)
    nesterov = bool(params.get("nesterov", False))
    rule = SGD(momentum=params.get("momentum", 0.0) != 0, nesterov=nesterov)
    return rule, _fill({"momentum": 0.0} | rule.defaults, params)


def _fill(defaults: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: params.get(name, default) for name, default in defaults.items()}


def _check_names(params: Mapping[str, Any], *, known: set[str]) -> None:
    for name, value in params.items():
        if name == "max_grad_norm":
            raise SpmdZeroConfigError(
                key="optimizer.params.max_grad_norm",
                value=value,
                reason="clipping is not the optimizer's, as in DeepSpeed",
                fix='Set the top-level key "gradient_clipping" instead.',
            )
        if name not in known:
            raise SpmdZeroConfigError(
                key=f"optimizer.params.{name}",
                value=value,
                reason="the optimizer has no such parameter",
                fix=did_you_mean(name, known=known),
            )
