"""A module that returns several losses: each is a mean, and any sum of them trains as in torch."""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from tests.support import engines
from tests.support.engines import assert_trained_as

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS, WIDTH = 16, 12
# How a module hands its losses over.
CONTAINERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda losses: {f"loss {index}": loss for index, loss in enumerate(losses)},
    "object": lambda losses: SimpleNamespace(first=losses[0], others=losses[1:]),
}


class Heads(nn.Module):
    """A loss for each input and target, by one layer that they share, and one of its own."""

    def __init__(self, count: int, container: str = "tuple") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, 10) for _ in range(count))
        self.container = container

    def forward(self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Any:
        losses = [
            F.cross_entropy(own(torch.tanh(self.shared(x))), y)
            for own, x, y in zip(self.own, inputs, targets, strict=True)
        ]
        return CONTAINERS[self.container](losses)


def flat(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, SimpleNamespace):
        return [outputs.first, *outputs.others]
    return list(outputs.values() if isinstance(outputs, dict) else outputs)


def batch(index: int, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(index)
    inputs = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]
    return inputs, [torch.randint(10, (ROWS,), generator=generator) for _ in range(count)]


def start(model: nn.Module, stage: int, gas: int = 1, **more: Any) -> spmdzero.Engine:
    """Plain SGD, whose update is the gradient."""
    return engines.start(
        model,
        train_micro_batch_size_per_gpu=ROWS // 8,
        gradient_accumulation_steps=gas,
        gradient_clipping=0.0,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        zero_optimization={"stage": stage},
        zero_allow_untested_optimizer=True,
        **more,
    )


@pytest.mark.parametrize(
    ("container", "count", "gas", "stage"),
    [
        ("tuple", 2, 2, 1),
        pytest.param("list", 3, 1, 2, marks=pytest.mark.slow),
        pytest.param("dict", 3, 3, 2, marks=pytest.mark.slow),
        ("object", 2, 1, 2),
    ],
)
def test_the_sum_of_all_losses_trains_as_in_torch(
    container: str, count: int, gas: int, stage: int
) -> None:
    model = Heads(count, container)
    plain = copy.deepcopy(model)
    engine = start(model, stage, gas)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    # The fourth step is the first that isn't traced.
    for step in range(4):
        for micro in range(gas):
            ours = flat(engine(*batch(step * gas + micro, count)))
            theirs = flat(plain(*batch(step * gas + micro, count)))
            assert [loss.shape for loss in ours] == [torch.Size([])] * count
            # fp32 on both sides, in another order.
            assert [x.item() for x in ours] == pytest.approx([x.item() for x in theirs], rel=1e-5)
            returned = engine.backward(sum(ours))
            assert returned.item() == pytest.approx(sum(x.item() for x in theirs) / gas, rel=1e-5)
            (sum(theirs) / gas).backward()
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps == 4
    assert_trained_as(engine, plain)


def weighted(engine: spmdzero.Engine, losses: list[torch.Tensor]) -> None:
    engine.backward(losses[0] + 3 * losses[2])


def one_only(engine: spmdzero.Engine, losses: list[torch.Tensor]) -> None:
    engine.backward(losses[1])


def retained(engine: spmdzero.Engine, losses: list[torch.Tensor]) -> None:
    engine.backward(losses[0], retain_graph=True)
    engine.backward(losses[1])


def of_torch(engine: spmdzero.Engine, losses: list[torch.Tensor]) -> None:
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])


def separate(engine: spmdzero.Engine, losses: list[torch.Tensor]) -> None:
    # Each has a graph of its own, so that torch needs no retain_graph either.
    engine.backward(losses[2])
    engine.backward(losses[0])


def separate_of_torch(engine: spmdzero.Engine, losses: list[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward()


WAYS: dict[Any, list[float]] = {
    weighted: [1, 0, 3],
    one_only: [0, 1, 0],
    retained: [1, 1, 0],
    separate: [1, 0, 1],
    separate_of_torch: [1, 1, 1],
    of_torch: [1, 1, 1],
}


# What the default suite leaves out.
LEFT = [one_only, retained, separate_of_torch, of_torch]


@pytest.mark.parametrize(
    "way", [weighted, separate, *(pytest.param(w, marks=pytest.mark.slow) for w in LEFT)]
)
def test_each_choice_of_losses_trains_as_in_torch(way: Callable[..., None]) -> None:
    model = Heads(3)
    plain = copy.deepcopy(model)
    engine = start(model, stage=2)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        way(engine, flat(engine(*batch(step, 3))))
        engine.step()
        losses = flat(plain(*batch(step, 3)))
        sum(weight * loss for weight, loss in zip(WAYS[way], losses, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_as(engine, plain)


@pytest.mark.backends("jax")
def test_a_loss_has_one_backward_and_what_it_needs_may_not_be_written_before_it() -> None:
    engine = start(Heads(2), stage=2)
    first, second = engine(*batch(0, 2))
    engine.backward(first)
    with pytest.raises(RuntimeError, match="a second time"):
        engine.backward(first)
    with torch.no_grad():
        engine.module.shared.bias.add_(1.0)
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="was written between"):
        engine.backward(second)
    first, second = engine(*batch(1, 2))
    engine.backward(first)
    engine.step()
    with pytest.raises(RuntimeError, match="a second time"):
        engine.backward(second)


def test_a_gradient_of_several_rows_enters_backward() -> None:
    model = nn.Linear(WIDTH, 10)
    plain = copy.deepcopy(model)
    engine = start(model, stage=1, gas=2)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        for micro in range(2):
            (x,), _ = batch(2 * step + micro, 1)
            grad = torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(step))
            outputs = engine(x)
            outputs.backward(grad.to(outputs.device))
            engine.step()
            (plain(x) / 2).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_as(engine, plain)
