"""A module that a client moves to its device, the CPU, is on the devices at its next call."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from spmdzero.backend import arrays
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._initialize import initialize_for_client
from tests.support.bounds import assert_summed
from tests.support.engines import config

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

ROWS = 16


class Scaled(nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.again = nn.Linear(64, 64), nn.Linear(64, 64)
        self.again.weight = self.line.weight
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.line(x).tanh()) * self.scale


def _trained(stage: int, move: bool, folder: Path | None = None) -> list[float]:
    torch.manual_seed(0)
    model = Scaled()
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = initialize_for_client(
        model=model,
        config=config(
            train_micro_batch_size_per_gpu=ROWS, optimizer=adam, zero_optimization=zero,
            spmd={"min_shard_elements": 0},
        ),
    )[0]  # fmt: skip
    losses = list[float]()
    for step in range(5):
        x = torch.linspace(-1, 1, ROWS * 64).reshape(ROWS, 64)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        if step != 2:
            continue
        if move:
            model.to(torch.device("cpu"))
            assert not any(map(arrays.is_mine, model.parameters()))
        # Another value while it is there, which training goes on with.
        model.line.bias.data.mul_(0.5)
        x = torch.ones(2, 64)
        losses.append(float(model(x).detach().sum()))
        if folder is not None:
            engine.save_checkpoint(str(folder))
    assert all(map(arrays.is_mine, [*model.parameters(), model.scale]))
    assert model.again.weight is model.line.weight
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_with_its_values(
    stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stayed = _trained(stage, move=False)
    with caplog.at_level(logging.WARNING, logger="spmdzero"):
        moved = _trained(stage, move=True, folder=tmp_path)
    for ours, plain in zip(moved, stayed, strict=True):
        assert_summed(torch.tensor(ours), torch.tensor(plain))
    assert "Scaled was moved to the CPU" in caplog.text
    assert "compiles its programs again" not in caplog.text


def test_another_dtype_stays_refused() -> None:
    model = Scaled()
    engine = initialize_for_client(model=model, config=config(train_micro_batch_size_per_gpu=ROWS))[
        0
    ]
    model.to("cpu", torch.bfloat16)
    with pytest.raises(SpmdZeroUsageError, match="was moved, by module"):
        engine(torch.ones(ROWS, 64))
    engine.destroy()
