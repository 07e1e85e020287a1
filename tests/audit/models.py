"""A model that is as it should be, and models that each provoke one finding."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.audit import AuditReport

ROWS, WIDTH, HIDDEN = 8, 64, 128


class Sound(nn.Module):
    """Two layers and a norm, `[rows, WIDTH]` -> mean square; `middle` is what others change.

    Torch_xla finds a program that another test compiled: a test that counts has its own `hidden`.
    """

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.norm = nn.LayerNorm(hidden)

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.middle(self.a(x)))).square().mean()


class AnyWidth(Sound):
    """It takes rows of fewer numbers too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (0, WIDTH - x.shape[1])))


class Mixed(nn.Module):
    """Each row becomes a sum over all rows."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ hidden.T @ hidden


class MixesRows(Sound):
    """A layer in the middle reads the rows of all devices."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = Mixed()

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mixed(hidden))


class NoNorm(Sound):
    """Every operation keeps the batch's sharding, also where propagation places it.

    The embedding of a position, of which there is one, is added to all rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.position = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.position(torch.zeros(1, dtype=torch.long, device=x.device)))


class ReadsValue(Sound):
    """Python looks at a value at each forward."""

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if self.a.bias.abs().sum().item() > 1e6 else self.norm(hidden)


class RunsOnCpu(Sound):
    """An operation without an XLA lowering."""

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden) + torch.special.i0(hidden)


class GrowsByItself(Sound):
    """Another graph at each call, for the same inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            hidden = hidden.sin()
        return self.norm(hidden)


def config(*, stage: int = 2, gas: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // 8,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    } | more


GLOBAL = {"spmd": {"forward": "global"}}


def engine_of(model: nn.Module, cfg: dict[str, Any]) -> spmdzero.Engine:
    return spmdzero.initialize(model=model, config=cfg)[0]


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(count)]


def audit_loop(
    engine: spmdzero.Engine,
    *,
    steps: int = 2,
    after: Callable[[spmdzero.Engine, torch.Tensor], object] = lambda engine, loss: None,
) -> AuditReport:
    """Audits a training loop that calls `after` at the end of each step."""
    with spmdzero.auditing(engine) as audit:
        for x in batches(steps):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            after(engine, loss)
    return audit.report


def names(report: AuditReport) -> list[str]:
    return [finding.name for finding in report.findings]
