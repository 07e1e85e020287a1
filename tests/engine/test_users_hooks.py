"""Hooks of torch's on the optimizer that `initialize` is given: they run around the engine's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import spmdzero
from tests.support.engines import Mean, config, one_call, replays, three_calls

pytestmark = pytest.mark.backends("any")

X = torch.arange(32.0).reshape(8, 4) / 32
CLASSES = [torch.optim.SGD, torch.optim.NAdam]
"""One that is known by its arithmetic, and one whose own `step` runs on stand-ins."""


class Steps:
    """Hooks around `step`; the first halves each gradient, as torch lets it. Notes who steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls: list[tuple[str, torch.optim.Optimizer]] = []
        self.before = optimizer.register_step_pre_hook(self.halve)
        self.after = optimizer.register_step_post_hook(
            lambda optimizer, *_: self.calls.append(("after", optimizer))
        )

    def halve(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.calls.append(("before", optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / 2


def start(make: Callable[..., torch.optim.Optimizer]) -> tuple[Any, Any, Any, Any, Steps]:
    """An engine and plain torch, both with the hooks; the engine's optimizers and hooks."""
    torch.manual_seed(0)
    plain, model = Mean(), Mean()
    plain.load_state_dict(model.state_dict())
    theirs, client = (make(m.parameters(), lr=0.1) for m in (plain, model))
    Steps(theirs)
    hooks = Steps(client)
    engine, optimizer, *_ = spmdzero.initialize(
        model=model,
        optimizer=client,
        config=config(optimizer=None, zero_allow_untested_optimizer=True),
    )

    def torchs() -> dict[str, torch.Tensor]:
        theirs.zero_grad()
        plain(X).backward()
        theirs.step()
        return {name: p.detach() for name, p in plain.named_parameters()}

    return engine, optimizer, client, torchs, hooks


@pytest.mark.parametrize("train", [three_calls, one_call])
@pytest.mark.parametrize("make", CLASSES)
def test_step_hooks_run_once_around_each_step_of_the_engine(
    make: Callable[..., torch.optim.Optimizer], train: Callable[..., Any]
) -> None:
    engine, optimizer, _, torchs, hooks = start(make)
    # More steps than it takes to trust a captured program.
    for _ in range(5):
        train(engine, X)
        expected = torchs()
        assert hooks.calls == [("before", optimizer), ("after", optimizer)]
        hooks.calls.clear()
        for name, parameter in engine.module.named_parameters():
            torch.testing.assert_close(parameter.detach().cpu(), expected[name])


def test_step_hooks_may_come_and_go_after_initialize() -> None:
    engine, optimizer, client, _, hooks = start(torch.optim.SGD)
    one_call(engine, X)
    hooks.before.remove()
    hooks.after.remove()
    hooks.calls.clear()
    for _ in range(4):
        one_call(engine, X)
    assert hooks.calls == []
    # No hook is left that would have each step traced.
    assert replays(engine)
    late: list[torch.optim.Optimizer] = []
    client.register_step_post_hook(lambda optimizer, *_: late.append(optimizer))
    one_call(engine, X)
    assert late == [optimizer]


def test_a_hook_of_all_optimizers_runs_around_each_step() -> None:
    model = Mean()
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, *_ = spmdzero.initialize(
        model=model,
        optimizer=client,
        config=config(optimizer=None, zero_allow_untested_optimizer=True),
    )
    stepped: list[torch.optim.Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    try:
        for _ in range(5):
            one_call(engine, X)
    finally:
        handle.remove()
    assert stepped == [optimizer] * 5


def test_a_refused_step_runs_no_hook() -> None:
    engine, _, client, _, hooks = start(torch.optim.SGD)
    engine.backward(engine(X))
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"engine\.step\(\)"):
        client.step()
    assert hooks.calls == []
    engine.step()
    assert len(hooks.calls) == 2


def test_hooks_of_the_state_dict_run_around_the_engines() -> None:
    model = Mean()
    client = torch.optim.AdamW(model.parameters())
    calls: list[tuple[str, torch.optim.Optimizer]] = []

    def saved(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        calls.append(("saved", optimizer))
        return state | {"note": "mine"}

    def loading(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        calls.append((f"loading {state.pop('note')}", optimizer))

    client.register_state_dict_pre_hook(lambda o: calls.append(("saving", o)))
    client.register_state_dict_post_hook(saved)
    client.register_load_state_dict_pre_hook(loading)
    client.register_load_state_dict_post_hook(lambda o: calls.append(("loaded", o)))
    engine, optimizer, *_ = spmdzero.initialize(
        model=model, optimizer=client, config=config(optimizer=None)
    )
    assert calls == []
    state = optimizer.state_dict()
    assert state["note"] == "mine"
    optimizer.load_state_dict(state)
    names = ["saving", "saved", "loading mine", "loaded"]
    assert calls == [(name, optimizer) for name in names]
    for refused in (client.state_dict, lambda: client.load_state_dict(state)):
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"Call engine\.optimizer"):
            refused()
    assert len(calls) == 4
    assert engine.optimizer is optimizer


def test_a_group_that_is_added_to_the_optimizer_given_to_initialize_is_refused() -> None:
    model = Mean()
    client = torch.optim.AdamW(model.parameters())
    engine, *_ = spmdzero.initialize(model=model, optimizer=client, config=config(optimizer=None))
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"AdamW\.add_param_group.*before"):
        client.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(client.param_groups) == 1
    for _ in range(4):
        one_call(engine, X)
    assert replays(engine)
    # An optimizer that no engine trains for any more is torch's own again.
    del engine, model
    client.param_groups.clear()
    client.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(client.param_groups) == 1
