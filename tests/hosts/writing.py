"""Trains a model whose forward writes its state in each way, and prints losses and what it wrote.

`python -m tests.hosts.writing CASES`: one host of some, or the only one.
"""

import copy
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import runtime
from tests.hosts.training import WIDTH, config_of, rows

STEPS = 6


class Writing(nn.Module):
    """Writes buffers and parameters by what it sees of its rows; what it wrote is in its loss."""

    by_data: torch.Tensor
    by_foreach: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, WIDTH)
        # Follows `wide`, as a momentum encoder does.
        self.slow = copy.deepcopy(self.wide).requires_grad_(False)
        for name in ("in_place", "by_view", "by_data", "by_foreach", "assigned"):
            self.register_buffer(name, torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("differs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to(self.wide.weight.dtype)
        with torch.no_grad():
            mean = x.mean(0)
            self.in_place.mul_(0.9).add_(mean)
            self.by_view[: WIDTH // 2] += mean[: WIDTH // 2]
            self.by_data.data.lerp_(mean.to(self.by_data.dtype), 0.25)
            torch._foreach_add_([self.by_foreach], [mean.square()])
            self.assigned = self.assigned * 0.5 + mean
            self.seen += len(x)
            for slow, fast in zip(self.slow.parameters(), self.wide.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)
        hidden = self.norm(self.wide(x)) + 0.1 * self.slow(x)
        noted = self.in_place + self.by_view + self.by_data + self.by_foreach + self.assigned
        return F.mse_loss((self.last(torch.tanh(hidden)) + 0.01 * noted).float(), y)


class Differing(Writing):
    """Counts what each replica has another number of."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.differs += (x > 0).sum()
        return super().forward(x, y)


def result_of(case: dict[str, Any]) -> dict[str, Any]:
    """What a host sees of a case."""
    torch.manual_seed(0)
    model = (Differing if case.get("differs") else Writing)()
    # What comes before a norm of two rows has a gradient of rounding, which Adam makes steps of.
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config = config_of(case) | sgd | {"zero_allow_untested_optimizer": True}
    engine = spmdzero.initialize(model=model, config=config)[0]
    losses = []
    try:
        for step in range(STEPS):
            if case.get("style") == "three calls":
                loss = engine(*rows(step))
                engine.backward(loss)
                engine.step()
            else:
                loss = engine.train_batch(iter([rows(step)]))
            losses.append(loss.item())
    except spmdzero.ReplicaRegionError as error:
        return {"error": str(error)}
    kept = {name: value for name, value in model.state_dict().items() if name != "differs"}
    written = {name: value.detach().cpu().double().tolist() for name, value in kept.items()}
    return {"losses": losses, "written": written, "hosts": runtime.process_count()}


def main() -> None:
    cases = json.loads(sys.argv[1])
    print(json.dumps({name: result_of(case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
