"""Which parameters Muon trains, and which the Adam beside it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from spmdzero.optim._adam import Adam
from spmdzero.optim._muon import Muon
from spmdzero.optim._rule import UpdateRule

_MUON_KEYS = ("lr", "momentum", "weight_decay", "ns_method")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
# They aren't FusedAdam's: MuonWithAuxAdam fills them in first
# (runtime/zero/muon/original_muon.py).
_ADAM_DEFAULTS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def is_muon_parameter(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains it: a matrix or more, by its name no embedding and no head.

    DeepSpeed's rule (`set_optimizer_flags`): ``embed`` and ``lm_head``, in any case, are the
    names it knows. An embedding of another name, such as ``wte``, is a matrix like others.
    """
    return parameter.dim() >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


def muon_groups(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], params: Mapping[str, Any]
) -> Iterator[tuple[UpdateRule, dict[str, Any]]]:
    """Each param group in two, its Muon and its Adam half, with the rule of each.

    The most specific number wins: a group's own, then `muon_lr` or `adam_lr`, then the config's
    (DeepSpeed, runtime/engine.py, `_muon_param_groups`). Frozen parameters are left out.

    Args:
        groups: torch param groups.
        names: parameter -> its name in the model.
        params: the config's ``optimizer.params``.
    """
    adam = Adam(decoupled=bool(params.get("adam_w_mode", True)), bias_correction=True)
    for index, group in enumerate(groups):
        prefix = group.get("name") or (f"group{index}" if len(groups) > 1 else None)
        trained = [p for p in group["params"] if p.requires_grad]
        muon = [p for p in trained if is_muon_parameter(names[p], p)]
        others = [p for p in trained if not is_muon_parameter(names[p], p)]
        if muon:
            settings = _settings(_MUON_KEYS, params, "muon_lr", group)
            rule = Muon(ns_method=settings.get("ns_method", "gram"))
            yield rule, {**rule.defaults, **settings, **_labels(prefix, "muon"), "params": muon}
        if others:
            settings = _settings(_ADAM_KEYS, params, "adam_lr", group)
            defaults = adam.defaults | _ADAM_DEFAULTS | {"use_muon": False}
            yield adam, {**defaults, **settings, **_labels(prefix, "adam"), "params": others}


def _settings(
    keys: tuple[str, ...], params: Mapping[str, Any], own_lr: str, group: Mapping[str, Any]
) -> dict[str, Any]:
    given = {key: params[key] for key in keys if params.get(key) is not None}
    if params.get(own_lr) is not None:
        given["lr"] = params[own_lr]
    return given | {key: group[key] for key in keys if key in group}


def _labels(prefix: str | None, half: str) -> dict[str, str]:
    return {"name": f"{prefix}-{half}-params" if prefix else f"{half}-params"}
