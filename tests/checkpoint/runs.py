"""Small runs to be saved and resumed: everything that a state can consist of, in little time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import spmdzero

ROWS, WIDTH = 16, 12


class Mean(nn.Module):
    """Subtracts the running mean of its input, a buffer that each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running.mul_(0.9).add_(0.1 * x.detach().float().mean(0))
        return x - self.running.to(x.dtype)


class Noisy(nn.Module):
    """Dropout draws random numbers, a buffer is written, 91 elements are padded on 8 devices."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), Mean(), nn.Dropout(0.2))
        self.odd = nn.Linear(24, 7)
        self.middle = nn.Linear(7, 13)
        self.head = nn.Linear(13, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.middle(self.odd(self.body(x.to(self.head.weight.dtype)))))
        return F.mse_loss(self.head(z).squeeze(-1).float(), y.float())


def make_model() -> Noisy:
    torch.manual_seed(0)
    return Noisy()


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, x.sum(1).tanh()


def dataset(rows: int = 80) -> TensorDataset:
    return TensorDataset(*batch(99, rows))


def config(stage: int = 2, gas: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 4},
        },
        # Of so small a model too parameters are to rest as shards.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "spmd": {"min_shard_elements": 64},
    } | more


def start(settings: dict[str, Any], **more: Any) -> spmdzero.Engine:
    return spmdzero.initialize(model=make_model(), config=settings, **more)[0]


def micro_batch(engine: spmdzero.Engine, number: int) -> float:
    loss = engine(*batch(number))
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine: spmdzero.Engine, numbers: range) -> list[float]:
    """One micro-batch for each number; returns the losses."""
    return [micro_batch(engine, number) for number in numbers]


def whole_state(engine: spmdzero.Engine) -> dict[str, torch.Tensor]:
    """Every tensor of the state, by its name in a checkpoint."""
    from spmdzero.state._live_state import live_state

    return {name: tensor.whole() for name, tensor in live_state(engine._training).tensors.items()}


def assert_state(engine: spmdzero.Engine, expected: dict[str, torch.Tensor]) -> None:
    """Every tensor of the engine's state is the expected one, bit for bit."""
    found = whole_state(engine)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
