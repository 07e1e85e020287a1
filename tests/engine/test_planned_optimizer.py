"""What a torch optimizer does and a planned one refuses, before it changes anything."""

import pytest
import torch
from torch import nn

import spmdzero


def test_what_a_planned_optimizer_cant_do_is_refused() -> None:
    _, optimizer, *_ = spmdzero.initialize(
        model=nn.Linear(4, 4),
        config={"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    )
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="no place in the sharding plan"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="calls no closure"):
        optimizer.step(lambda: torch.zeros(()))
