from typing import Any

import pytest
import torch

from spmdzero.optim import SGD, Adagrad, Adam, Lamb, Lion, UpdateRule, rule_from_config

pytestmark = pytest.mark.backends("any")


def test_config_names_a_rule_as_deepspeed_does() -> None:
    rules: list[tuple[str, dict[str, Any], UpdateRule]] = [
        ("Adam", {}, Adam(decoupled=True, bias_correction=True)),
        ("Adam", {"adam_w_mode": False}, Adam(decoupled=False, bias_correction=True)),
        (
            "Adam",
            {"adam_w_mode": False, "bias_correction": False},
            Adam(decoupled=False, bias_correction=False),
        ),
        ("AdamW", {"adam_w_mode": False}, Adam(decoupled=True, bias_correction=True)),
        ("SGD", {}, SGD(momentum=False, nesterov=False)),
        ("SGD", {"momentum": 0.9}, SGD(momentum=True, nesterov=False)),
        ("SGD", {"momentum": 0.9, "nesterov": True}, SGD(momentum=True, nesterov=True)),
        ("Adagrad", {}, Adagrad()),
        ("Lion", {}, Lion()),
        ("Lamb", {}, Lamb(bias_correction=True, eps_inside_sqrt=False)),
        (
            "Lamb",
            {"bias_correction": False, "eps_inside_sqrt": True},
            Lamb(bias_correction=False, eps_inside_sqrt=True),
        ),
    ]
    for type_, params, rule in rules:
        assert rule_from_config(type_, params)[0] == rule


def test_fused_adam_has_no_weight_decay_by_default_and_torchs_adamw_has() -> None:
    assert rule_from_config("AdamW", {})[1]["weight_decay"] == 0.0
    group = rule_from_config("AdamW", {"torch_adam": True})[1]
    expected = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    assert group == {name: expected[name] for name in group}
    assert {"lr", "betas", "eps", "weight_decay"} <= set(group)
    group = rule_from_config("Adam", {"torch_adam": True, "adam_w_mode": False})[1]
    assert group["weight_decay"] == 0.0


def test_sgd_group_has_torchs_defaults() -> None:
    rule, group = rule_from_config("SGD", {})
    expected = torch.optim.SGD([torch.zeros(1)]).param_groups[0]
    assert group == {name: expected[name] for name in group}
    assert set(rule.defaults) == set(group)


def test_config_values_reach_the_group() -> None:
    params = {"lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}
    _, group = rule_from_config("AdamW", params)
    assert {name: group[name] for name in params} == params
