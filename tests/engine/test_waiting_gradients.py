"""Gradients that wait for a step: who may forget them, and who must not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.errors import NonFiniteError, SpmdZeroUsageError
from tests.support import engines
from tests.support.selected import product_rows

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

BATCH = torch.ones(8, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return self.second(hidden).pow(2).mean(), hidden


def start(gas: int = 1, **more: Any) -> spmdzero.Engine:
    usual = {"gradient_accumulation_steps": gas, "zero_optimization": {"stage": 1}}
    return engines.start(Net(), **usual | more)


def gradient(engine: spmdzero.Engine) -> torch.Tensor:
    return engine.module.first.weight.grad.float().cpu()


def expected() -> torch.Tensor:
    model = Net()
    model(BATCH)[0].backward()
    return model.first.weight.grad


@pytest.mark.parametrize("forward", ["region", "global"])
def test_a_plain_backward_is_divided_once_whatever_else_forward_returns(forward: str) -> None:
    engine = start(4, spmd={"forward": forward})
    loss, _ = engine(BATCH)  # computed from the second output, as a loss is from logits
    loss.backward()
    # Summed over devices in another order.
    torch.testing.assert_close(gradient(engine), expected() / 4, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("whose", "forward"),
    product_rows(
        *(["engine", "optimizer"], ["region", "global"]),
        quick={("engine", "region"), ("optimizer", "global")},
    ),
)
def test_zero_grad_forgets_what_plain_backwards_left_with_autograd(
    forward: str, whose: str
) -> None:
    engine = start(spmd={"forward": forward})
    engine(BATCH)[0].backward()
    engine.module.first.weight.pow(2).sum().backward()
    (engine if whose == "engine" else engine.optimizer).zero_grad()
    assert engine.module.first.weight.grad is None


def _plain(engine: spmdzero.Engine) -> None:
    engine(BATCH)[0].backward()


def _through_engine(engine: spmdzero.Engine) -> None:
    engine.backward(engine(BATCH)[0])


def _then_another_forward(engine: spmdzero.Engine) -> None:
    _through_engine(engine)
    engine(BATCH)


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "unmanaged"])
@pytest.mark.parametrize("begin", [_plain, _through_engine, _then_another_forward])
def test_no_change_of_the_batch_size_drops_a_gradient(
    managed: bool, begin: Callable[[spmdzero.Engine], None]
) -> None:
    engine = start(2, managed_gradient_accumulation=managed)
    begin(engine)
    with pytest.raises(SpmdZeroUsageError, match="middle of a gradient accumulation"):
        engine.set_train_batch_size(8)
    assert engine.module.first.weight.grad is not None


def test_a_train_batch_that_fails_leaves_no_gradient_to_the_next() -> None:
    engine = start(2, managed_gradient_accumulation=False)
    with pytest.raises(SpmdZeroUsageError, match="rows"):
        engine.train_batch(iter([(BATCH,), (BATCH[:3],)]))
    assert engine.module.first.weight.grad is None


def test_accumulators_outlive_a_smaller_batch_where_the_caller_ends_steps() -> None:
    engine = start(2, managed_gradient_accumulation=False)
    before = set(engine.named_tensors())
    engine.set_train_batch_size(8)
    assert set(engine.named_tensors()) == before


def test_a_boundary_that_the_caller_set_ends_the_step_for_all() -> None:
    engine = start(4)
    for boundary in (False, True):
        engine.set_gradient_accumulation_boundary(boundary)
        _through_engine(engine)
        engine.step()
    with pytest.raises(SpmdZeroUsageError, match="after set_gradient_accumulation_boundary"):
        engine.train_batch(iter([(BATCH,)] * 4))
    engine.set_train_batch_size(8)
    assert (engine.global_steps, engine.gradient_accumulation_steps()) == (1, 1)


def test_fp16_without_an_optimizer_scales_neither_the_loss_nor_the_gradient() -> None:
    engine = start(optimizer=None, fp16={"enabled": True, "auto_cast": True})
    _through_engine(engine)
    # fp16 has 11 bits, and each of a few operations rounds.
    torch.testing.assert_close(gradient(engine), expected(), rtol=5e-3, atol=1e-4)
    engine.zero_grad()
    _plain(engine)
    torch.testing.assert_close(gradient(engine), expected(), rtol=5e-3, atol=1e-4)


def test_check_finite_lets_a_dynamic_loss_scale_find_its_size() -> None:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 30, "hysteresis": 1}
    engine = start(fp16=fp16, spmd={"check_finite": True})
    _through_engine(engine)
    engine.step()
    assert (engine.skipped_steps, engine.cur_scale) == (1, 2.0**29)
    loss = engine(BATCH)[0]
    engine.backward(loss * torch.tensor(float("nan")).to(engine.device))
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        engine.step()
