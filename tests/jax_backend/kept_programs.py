"""A training whose compiled programs are kept in a folder; prints what came out, as JSON."""

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import counters
from spmdzero.backend.jax.graph._execute import compilations


class Net(nn.Module):
    """Two layers of 16 by 16 around a function without parameters."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.one, self.other, self.between = nn.Linear(16, 16), nn.Linear(16, 16), between

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        if self.between == "cholesky":
            hidden = torch.linalg.cholesky(hidden.T @ hidden + 16 * torch.eye(16).to(x.device))
            hidden = hidden[: len(x)]
        else:
            hidden = getattr(torch, self.between)(hidden)
        return F.mse_loss(self.other(hidden), y)


def trained(folder: str, between: str) -> dict[str, object]:
    """Losses of four steps; programs that were compiled, lowered, loaded; donated inputs."""
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(
        model=Net(between),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 2},
            "spmd": {"compile_cache": folder},
        },
    )
    losses = []
    for step in range(4):
        x, y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    programs = [compilations.count, compilations.lowered, compilations.loaded]
    donated = counters.aliased_inputs()
    return {"losses": losses, "programs": programs, "donated": donated}


if __name__ == "__main__":
    print(json.dumps(trained(*sys.argv[1:])))
