"""`deepspeed.initialize` counts a client's rows, also where a function stands in its place."""

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero.integrations
from spmdzero.backend import runtime

ROWS = 16
# Called by a function of accelerate's, which takes the name's present value.
CALL = "import deepspeed\nmade = deepspeed.initialize(model=model, config=config)"


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x).mean()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_clients_rows_are_those_of_a_process(
    replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spmdzero.integrations.install()
    deepspeed: Any = importlib.import_module("deepspeed")
    if replaced:
        own = deepspeed.initialize

        @functools.wraps(own)
        def standing(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        monkeypatch.setattr(deepspeed, "initialize", standing)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    names = {"__name__": "accelerate.accelerator", "model": Mean(), "config": config}
    exec(CALL, names)
    engine, *_ = names["made"]
    assert engine.train_batch_size() == ROWS
    assert engine.train_micro_batch_size_per_gpu() * runtime.device_count() == ROWS
