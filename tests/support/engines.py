"""Engines as most tests start them, the two ways to train a step, and torch's numbers beside it."""

from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import counters, current
from spmdzero.engine._step_end import AgreementRhythm

Batch: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


class Mean(nn.Module):
    """The least that trains: `[rows, 4]` -> the mean of a linear layer, as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x).float().mean()


class Squares(nn.Module):
    """`[rows, width]` -> the mean of a linear layer's squares, as a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x.to(self.line.weight.dtype)).float().square().mean()


def config(**more: Any) -> dict[str, Any]:
    """AdamW at stage 2 with a row for each device; `more` takes the place of keys."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    } | more


def start(model: nn.Module, **more: Any) -> spmdzero.Engine:
    """The engine of `config(**more)`."""
    return spmdzero.initialize(model=model, config=config(**more))[0]


def three_calls(engine: spmdzero.Engine, *batches: Batch) -> torch.Tensor:
    """Forward, backward, step for each micro-batch; the last one's loss."""
    for batch in batches:
        loss = engine(*batch) if isinstance(batch, tuple) else engine(batch)
        engine.backward(loss)
        engine.step()
    return loss


def one_call(engine: spmdzero.Engine, *batches: Batch) -> torch.Tensor:
    """`train_batch` of the micro-batches."""
    return engine.train_batch(iter(batches))


def replays(engine: spmdzero.Engine) -> bool:
    """Whether steps ran without the model's Python, where the backend can do that."""
    return engine.capture.replayed > 0 or current().compiler is None


def assert_trained_as(
    engine: spmdzero.Engine, model: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Every parameter is what torch made of it in `model`.

    The bounds are those of fp32's 7 digits, where devices sum in another order than a batch does.
    """
    theirs = dict(model.named_parameters())
    for name, parameter in engine.module.named_parameters():
        ours, expected = parameter.detach().cpu().float(), theirs[name].detach()
        torch.testing.assert_close(
            ours, expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def ask_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines not ask now and then what their devices have found, which reads."""
    monkeypatch.setattr(AgreementRhythm, "is_due", lambda _: False)


def reads() -> int:
    """Transfers from the devices so far."""
    return counters.host_reads()
