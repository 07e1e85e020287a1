"""What a torch optimizer does and a planned one refuses, before it changes anything."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_what_a_planned_optimizer_cant_do_is_refused() -> None:
    _, optimizer, *_ = spmdzero.initialize(model=nn.Linear(4, 4), config=CONFIG)
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="no place in the sharding plan"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="calls no closure"):
        optimizer.step(lambda: torch.zeros(()))


def test_a_parameter_that_came_into_a_group_by_hand_is_refused() -> None:
    engine, optimizer, *_ = spmdzero.initialize(model=nn.Linear(4, 4), config=CONFIG)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    engine.backward(engine(torch.ones(8, 4)).sum())
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"shape \[3\] that initialize was not"):
        engine.step()


@pytest.mark.parametrize("change", [list.pop, lambda groups: groups.append(groups[0])])
def test_a_group_that_came_or_went_by_hand_is_refused(
    change: Callable[[list[dict[str, Any]]], object],
) -> None:
    engine, optimizer, *_ = spmdzero.initialize(model=nn.Linear(4, 4), config=CONFIG)
    change(optimizer.param_groups)
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="had 1 entries after initialize and has"):
        engine(torch.ones(8, 4))
