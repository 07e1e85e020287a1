"""A folded backward pass runs the forward's Python again: as the forward saw it, and no more."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from tests.engine.captured import WIDTH, assert_twins_agree, make_engine, rows, twins

pytestmark = pytest.mark.backends("jax")


class Net(nn.Module):
    """Two heads, of which an attribute chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.task, self.dropout = "a", nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(getattr(self, self.task)(x)).float().square().mean()


def two_tasks(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    engine.module.task = "a"
    first = engine(rows(index))
    engine.module.task = "b"
    loss = first + 2 * engine(rows(100 + index))
    engine.backward(loss)
    return loss


def train_and_eval(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    engine.train()
    first = engine(rows(index))
    engine.eval()
    loss = first + engine(rows(index))
    engine.backward(loss)
    return loss


def autocast_around_the_forward(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = engine(rows(index))
    engine.backward(loss)
    return loss


@pytest.mark.parametrize("micro_step", [two_tasks, train_and_eval, autocast_around_the_forward])
def test_the_backward_is_that_of_the_forward_that_ran(
    micro_step: Callable[[spmdzero.Engine, int], torch.Tensor],
) -> None:
    folding = assert_same_with_and_without_capture(Net, micro_step)
    assert folding.replayed + folding.compared


def assert_same_with_and_without_capture(
    module: Callable[[], nn.Module], micro_step: Callable[[spmdzero.Engine, int], torch.Tensor]
) -> Any:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = []
        for index in range(5):
            loss = micro_step(engine, index)
            engine.step()
            losses.append(loss.item())
        return losses

    engines = twins(module)
    assert_twins_agree(engines, run)
    return engines[1].capture


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1


class Halve(Same):
    """Python chooses by the gradient's values."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5 if grad.detach().mul(0).sum() == 0 else grad


class Noise(Same):
    """Gradient noise."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + 0.05 * torch.randn_like(grad)


class Reads(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Halve.apply(self.a(x)))


class Draws(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Noise.apply(self.a(x)))


class Counts(Net):
    """A tensor hook counts, and the count is in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scaled(self, grad: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return grad * self.calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        if hidden.requires_grad:
            hidden.register_hook(self.scaled)
        return super().forward(hidden)


class Swallows(Net):
    """Takes whatever stops it from reading a value for an error of the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            factor = 2.0 if (x.detach() * 0).sum().item() == 0 else 1.0
        except Exception:
            factor = 5.0
        return super().forward(x) * factor


def one_batch(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    loss = engine(rows(index))
    engine.backward(loss)
    return loss


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Reads, "reads a value from the devices"),
        (Draws, "what runs in backward draws random numbers"),
        (Counts, "the backward changes the module: 'calls' of the module"),
        (Swallows, "reads a value from the devices"),
    ],
)
def test_python_that_backward_runs_keeps_it_from_being_folded(
    module: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert_same_with_and_without_capture(module, one_batch)
    assert reason in caplog.text


class Logs(Net):
    """Returns a list that has no tensor in it."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x), "logs": []}


def test_what_the_caller_writes_into_an_output_is_not_in_the_next() -> None:
    engine = make_engine(Logs())
    for index in range(6):
        output = engine(rows(index))
        assert output["logs"] == []
        output["logs"].append(index)
        engine.backward(output["loss"])
        engine.step()
    assert engine.capture.replayed + engine.capture.compared == 6
