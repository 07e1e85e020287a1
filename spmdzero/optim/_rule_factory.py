"""From an optimizer in the config, or a torch optimizer, to an update rule."""

from collections.abc import Mapping
from typing import Any

import torch

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._adagrad import Adagrad
from spmdzero.optim._adam import Adam
from spmdzero.optim._elementwise_proof import elementwise_rule
from spmdzero.optim._lamb import Lamb
from spmdzero.optim._lion import Lion
from spmdzero.optim._named import FusedAdam, FusedLamb, FusedLion
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
DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon")
"""The names that are no class of torch.optim to be proven, but rules."""

# DeepSpeed 0.19.8, runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS, by the config's names.
_TESTED_NAMES = ("adam", "adamw", "adagrad", "lion", "muon")
_TESTED_CLASSES = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    FusedAdam,
    FusedLion,
)


def is_tested(optimizer: str | torch.optim.Optimizer) -> bool:
    """Whether DeepSpeed runs it under ZeRO without `zero_allow_untested_optimizer`.

    Args:
        optimizer: its name in the config, or the user's own.
    """
    if isinstance(optimizer, str):
        return optimizer.lower() in _TESTED_NAMES
    return type(optimizer) in _TESTED_CLASSES


def rule_from_config(type: str, params: Mapping[str, Any]) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule and the param group defaults that `{"type": ..., "params": ...}` stands for.

    The meaning is DeepSpeed's (runtime/engine.py, `_configure_basic_optimizer`): names are
    case-insensitive; "Adam" is AdamW unless `adam_w_mode` is false; "AdamW" always is.
    `torch_adam` chooses an implementation there. All it changes here is AdamW's default weight
    decay: torch's 0.01 instead of FusedAdam's 0. For "Muon" there is a rule for each half of the
    parameters: see `muon_groups`.

    Raises:
        SpmdZeroConfigError: an unknown type or parameter, or a value that can't be honoured.
    """
    makers = {"adam": _adam, "adamw": _adamw, "sgd": _sgd, "adagrad": _adagrad}
    makers |= {"lion": _lion, "lamb": _lamb}
    if type.lower() not in makers:
        raise SpmdZeroConfigError(
            key="optimizer.type",
            value=type,
            reason="there is no sharded update of this name",
            fix=did_you_mean(type, known=DEEPSPEED_OPTIMIZERS),
        )
    rule, group = makers[type.lower()](params)
    rule.validate(group | {option: params.get(option, False) for option in _REFUSED})
    return rule, group


def rules_from_torch(optimizer: torch.optim.Optimizer, *, device: torch.device) -> list[UpdateRule]:
    """The rule of each param group that does what `optimizer.step` would do to it.

    The classes that are known by their arithmetic: torch.optim.Adam, AdamW, SGD and Adagrad
    themselves (a subclass may compute something else), FusedAdam, FusedLamb and FusedLion. For
    any other class the rule runs its own `step` on shards, see `elementwise_rule`.

    Args:
        optimizer: over any tensors; it has taken no step.
        device: where the class is tried, the one that it will run on.

    Raises:
        SpmdZeroConfigError: a class that can't be proven elementwise, an option that the rule
            does not have, a tensor as lr, or param groups that differ in more than numbers.
    """
    rule = _known_rule(optimizer)
    if rule is None:
        return [elementwise_rule(optimizer, g, device=device) for g in optimizer.param_groups]
    for group in optimizer.param_groups:
        rule.validate(group)
    return [rule] * len(optimizer.param_groups)


def _known_rule(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    first = optimizer.param_groups[0]
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
    return Adagrad() if type(optimizer) is torch.optim.Adagrad else None


def _adamw(params: Mapping[str, Any]) -> tuple[Adam, dict[str, Any]]:
    return _adam({**params, "adam_w_mode": True})


def _adam(params: Mapping[str, Any]) -> tuple[Adam, dict[str, Any]]:
    torch_adam = bool(params.get("torch_adam", False))
    _check_names(params, known=_TORCH_ADAM_PARAMS if torch_adam else _FUSED_ADAM_PARAMS)
    rule = Adam(
        decoupled=bool(params.get("adam_w_mode", True)),
        bias_correction=bool(params.get("bias_correction", True)),
    )
    defaults = rule.defaults
    if torch_adam:
        del defaults["bias_correction"]
        defaults["weight_decay"] = 1e-2 if rule.decoupled else 0.0
    group = _fill(defaults, params)
    # FusedAdam keeps the JSON's list, torch's class makes a tuple of it: `get_mom` shows them.
    if torch_adam:
        group["betas"] = tuple(group["betas"])
    return rule, group


def _sgd(params: Mapping[str, Any]) -> tuple[SGD, dict[str, Any]]:
    _check_names(params, known=_SGD_PARAMS)
    nesterov = bool(params.get("nesterov", False))
    rule = SGD(momentum=params.get("momentum", 0.0) != 0, nesterov=nesterov)
    return rule, _fill({"momentum": 0.0} | rule.defaults, params)


def _adagrad(params: Mapping[str, Any]) -> tuple[Adagrad, dict[str, Any]]:
    rule = Adagrad()
    _check_names(params, known={*rule.defaults, "maximize", "differentiable", "foreach", "fused"})
    return rule, _fill(rule.defaults, params)


def _lion(params: Mapping[str, Any]) -> tuple[Lion, dict[str, Any]]:
    rule = Lion()
    _check_names(params, known={*rule.defaults, "set_grad_none"})
    return rule, _fill(rule.defaults, params)


def _lamb(params: Mapping[str, Any]) -> tuple[Lamb, dict[str, Any]]:
    rule = Lamb(
        bias_correction=bool(params.get("bias_correction", True)),
        eps_inside_sqrt=bool(params.get("eps_inside_sqrt", False)),
    )
    _check_names(params, known={*rule.defaults, "eps_inside_sqrt", "amsgrad"})
    return rule, _fill(rule.defaults, params)


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
