"""A small regression, trained by the engine and by torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support import engines

ROWS, WIDTH = 16, 12
# fp32 on both sides, other summation orders; ten Adam steps keep losses of order 1 this close.
CLOSE = {"rel": 1e-5, "abs": 1e-6}


class Regression(nn.Module):
    """Returns its loss when it gets a target, its prediction otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.Tanh())
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        prediction = self.head(self.body(x)).squeeze(-1)
        return prediction if y is None else F.mse_loss(prediction, y)


def make_model() -> Regression:
    torch.manual_seed(0)
    return Regression()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1).tanh()


def config(**more: Any) -> dict[str, Any]:
    """Of any optimizer, with all but the smallest tensors sharded; `more` takes keys' places."""
    usual = {
        "train_micro_batch_size_per_gpu": ROWS // 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_allow_untested_optimizer": True,
        "spmd": {"min_shard_elements": 64},
    }
    return engines.config(**usual | more)


def reference(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    steps: int = 6,
    schedule: Any = None,
    clip: float = 1.0,
) -> list[float]:
    """The losses of torch's own steps."""
    losses = []
    for step in range(steps):
        loss = model(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def torch_losses() -> list[float]:
    """Of torch's AdamW as `config` has it."""
    model = make_model()
    return reference(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), model)
