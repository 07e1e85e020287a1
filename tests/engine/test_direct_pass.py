"""The backward of a loss as the forward returned it goes past autograd, which nobody notices."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spmdzero.engine import _folded_call
from tests.engine.captured import Residual, batches, make_engine

pytestmark = pytest.mark.backends("jax")

Register = Callable[[torch.Tensor, Callable[[Any], None]], Any]


def on_the_loss(loss: torch.Tensor, hook: Callable[[Any], None]) -> Any:
    return loss.register_hook(hook)


def before_its_node(loss: torch.Tensor, hook: Callable[[Any], None]) -> Any:
    node = loss.grad_fn
    assert node is not None
    return node.register_prehook(hook)


def after_its_node(loss: torch.Tensor, hook: Callable[[Any], None]) -> Any:
    node = loss.grad_fn
    assert node is not None
    return node.register_hook(lambda _, given: hook(given))


def rows(index: int) -> torch.Tensor:
    ((batch,),) = batches(1, first=index)
    return batch


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each backward so far went past autograd."""
    found: list[bool] = []
    decide = _folded_call.DirectPass.of.__func__  # type: ignore[missing-attribute]

    def noted(cls: Any, *args: Any) -> Any:
        made = decide(cls, *args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(_folded_call.DirectPass, "of", classmethod(noted))
    return found


@pytest.mark.parametrize("register", [on_the_loss, before_its_node, after_its_node])
def test_a_hook_on_the_way_of_the_gradient_is_called(
    register: Register, direct: list[bool]
) -> None:
    engine, calls = make_engine(), []
    for index in range(6):
        loss = engine(rows(index))
        if index % 2:
            register(loss, lambda given: calls.append(given))
        engine.backward(loss)
        engine.step()
    # The first forwards are compared, and are folded too.
    assert direct == [True, False] * 3
    assert len(calls) == 3


def test_a_retained_gradient_is_there() -> None:
    engine = make_engine()
    for index in range(4):
        loss = engine(rows(index))
        loss.retain_grad()
        engine.backward(loss)
        assert loss.grad is not None
        assert loss.grad.item() == 1
        engine.step()


@pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.slow), {"fp16": {"enabled": True}}]
)
def test_steps_are_those_of_autograd_bit_for_bit(
    changes: dict[str, Any], direct: list[bool]
) -> None:
    def trained(*, hook: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        engine = make_engine(gradient_accumulation_steps=2, **changes)
        for index in range(8):
            loss = engine(rows(index))
            if hook:
                loss.register_hook(lambda grad: None)
            returned = engine.backward(loss)
            assert returned.item() == loss.item() / 2
            engine.step()
        return [parameter.detach().cpu() for parameter in engine.module.parameters()]

    one, other = trained(hook=False), trained(hook=True)
    assert direct == [True] * 8 + [False] * 8
    for mine, its in zip(one, other, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_a_loss_in_fp16_overflows_as_in_autograd(direct: list[bool]) -> None:
    class InHalf(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).half()

    engines = [make_engine(InHalf(), fp16={"enabled": True}) for _ in range(2)]
    for index in range(6):
        for engine in engines:
            loss = engine(rows(index))
            if engine is engines[0]:
                loss.register_hook(lambda grad: None)
            engine.backward(loss)
            engine.step()
    assert direct == [False, True] * 6
    one, other = engines
    # The first scale, 2 ** 16, is more than fp16 has.
    assert one.skipped_steps == other.skipped_steps > 0
    assert one.cur_scale == other.cur_scale


@pytest.mark.parametrize("plain", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_second_backward_needs_retain_graph(plain: bool) -> None:
    engine = make_engine()
    for index in range(3):
        loss = engine(rows(index))
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward() if plain else engine.backward(loss)
        engine.step()


def test_a_loss_that_the_script_keeps_does_not_keep_its_batch() -> None:
    engine, losses = make_engine(), []
    for index in range(4):
        placed = rows(index).to(engine.device)
        batch = weakref.ref(placed)
        losses.append(engine(placed))
        engine.backward(losses[-1])
        engine.step()
        del placed
        gc.collect()
        assert batch() is None


def test_another_engines_loss_is_autograds(direct: list[bool]) -> None:
    one, other = make_engine(), make_engine()
    for index in range(3):
        loss = one(rows(index))
        other.backward(loss)
        one.step()
    assert direct == [False] * 3
    assert one.global_steps == 3
