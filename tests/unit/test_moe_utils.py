"""Scripts with an option for experts start and train without it."""

import pytest
import torch
from spmdzero.compression.helper import recursive_getattr
from spmdzero.moe.utils import (
    has_moe_layers,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)

pytestmark = pytest.mark.backends("any")


def test_a_model_without_experts_has_the_groups_that_it_had() -> None:
    model = torch.nn.Linear(2, 2)
    group = {"params": model.parameters(), "name": "parameters"}
    (found,) = split_params_into_different_moe_groups_for_optimizer(group)
    assert found["params"] == [model.weight, model.bias]
    assert not is_moe_param_group(found)
    assert has_moe_layers(model) == (False, 0)


def test_what_is_left_of_compression_are_the_helpers() -> None:
    assert recursive_getattr(torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.out_features") == 3
