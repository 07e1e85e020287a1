"""A module that is changed after `initialize`: frozen, unfrozen, given parameters, used again."""

import copy
import functools
import gc
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

import spmdzero
from spmdzero.backend.pure import ModuleWatch
from spmdzero.integrations._client_engine import ClientEngine
from tests.support.engines import config, one_call, start, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS = torch.linspace(-1, 1, 32).reshape(8, 4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.extra: nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return (y if self.extra is None else y + self.extra).square().mean()


RUNS = pytest.mark.parametrize(
    "run", [three_calls, pytest.param(one_call, marks=pytest.mark.slow)], ids=["three", "one"]
)


@RUNS
def test_what_is_frozen_and_unfrozen_in_mid_run_is_named_once(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two()
    model.first.requires_grad_(requires_grad=False)
    engine = start(model)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="spmdzero"):
        run(engine, ROWS)
        assert not caplog.messages
        model.first.weight.requires_grad_()
        model.second.bias.requires_grad_(requires_grad=False)
        run(engine, ROWS)
        run(engine, ROWS)
        model.second.bias.requires_grad_()
        run(engine, ROWS)
        model.second.bias.requires_grad_(requires_grad=False)
        run(engine, ROWS)
    on, off = caplog.messages
    assert on.startswith("first.weight: requires_grad was turned on after initialize")
    assert off.startswith("second.bias: requires_grad was turned off after initialize")


@RUNS
@pytest.mark.parametrize(
    "spmd",
    [
        {},
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in ({"capture": False}, {"forward": "global"})
        ),
    ],
    ids=str,
)
def test_a_parameter_that_is_added_later_is_refused_by_name(run: Any, spmd: Any) -> None:
    engine = start(Two(), spmd=spmd)
    run(engine, ROWS)
    engine.module.extra = nn.Parameter(torch.zeros(4, device=engine.device))
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"extra is a parameter .* initialize"):
        run(engine, ROWS)
    engine.module.extra.requires_grad_(requires_grad=False)
    run(engine, ROWS)
    assert engine.global_steps == 2


def test_a_parameter_that_takes_the_place_of_another_is_refused_by_name() -> None:
    engine = start(Two())
    three_calls(engine, ROWS)
    engine.module.first.bias = nn.Parameter(torch.zeros(4, device=engine.device))
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"first\.bias\.data\.copy_"):
        three_calls(engine, ROWS)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by, self.inner = 1.0, nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def _inside(scale: Scale) -> nn.Module:
    outer = Scale()
    outer.inner["deep"] = scale
    return outer


# Ways in which a module holds another that is none of its submodules.
HOLDERS: dict[str, Callable[[Scale], Any]] = {
    "list": lambda scale: [scale],
    "dict": lambda scale: {"a": scale},
    "bound method": lambda scale: scale.forward,
    "bound method of a class": lambda scale: types.MethodType(Scale.forward, scale),
    "partial": lambda scale: functools.partial(scale, x=1),
    "argument of a partial": lambda scale: functools.partial(print, scale, end=""),
    "named one": lambda scale: {"a": functools.partial(print, end=scale)},
    "object": lambda scale: types.SimpleNamespace(scale=scale),
    "a hidden module's submodule": lambda scale: [_inside(scale)],
    "a hidden module's list": lambda scale: [nn.Sequential(Holds([scale]))],
}


class Holds(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.weight = held, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[0](x * self.weight).mean()


@pytest.mark.parametrize("way", HOLDERS)
def test_a_module_that_is_none_of_its_submodules_is_watched(way: str) -> None:
    scale = Scale()
    watch = ModuleWatch(Holds(HOLDERS[way](scale)), {})
    assert watch.change() is None
    scale.by = 5.0
    assert "'by' of " in (watch.change() or "")
    watch.restore()
    assert scale.by == 1.0
    scale.inner["new"] = nn.Identity()
    assert "has 1 entries, not 0" in (watch.change() or "")


def test_state_and_hooks_of_a_hidden_module_are_watched_too() -> None:
    norm = nn.BatchNorm1d(4)
    watch = ModuleWatch(Holds([norm]), {})
    assert norm.running_mean is not None
    norm.running_mean.add_(1)
    assert "'running_mean' of '_buffers' of 0 of 'held' of the module was written" in (
        watch.change() or ""
    )
    watch.restore()
    assert not norm.running_mean.any()
    norm.register_forward_hook(lambda module, args, output: None)
    assert "has 1 entries, not 0" in (watch.change() or "")
    assert ModuleWatch(Holds([norm]), {}).hook is not None


def _adds(by: float = 1.0) -> Callable[[], float]:
    def added() -> float:
        return by

    return added


def _returns(what: float) -> Callable[..., float]:
    def returned(value: float = what) -> float:
        return value

    return returned


def _bound() -> ModuleWatch:
    return ModuleWatch(nn.Identity(), {})


BOUND = _bound()
CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any], bool]] = {
    "a function of the same lines": (lambda: _returns(1.0), lambda: _returns(1.0), True),
    "another default": (lambda: _returns(1.0), lambda: _returns(2.0), False),
    # What it closes over isn't watched.
    "a closure": (_adds, _adds, False),
    "a partial call": (
        lambda: functools.partial(max, 1.0, key=None),
        lambda: functools.partial(max, 1.0, key=None),
        True,
    ),
    "another keyword": (
        lambda: functools.partial(max, key=None),
        lambda: functools.partial(max, key=abs),
        False,
    ),
    "another function": (lambda: functools.partial(max), lambda: functools.partial(min), False),
    "a bound method": (lambda: BOUND.change, lambda: BOUND.change, True),
    "that of another object": (lambda: BOUND.change, lambda: _bound().change, False),
}


@pytest.mark.parametrize("of", CALLS)
def test_a_call_that_is_made_anew_is_compared_by_what_it_does(of: str) -> None:
    module: Any = nn.Linear(1, 1)
    first, then, same = CALLS[of]
    module.call = first()
    watch = ModuleWatch(module, {})
    module.call = then()
    assert (watch.change() is None) is same


def test_what_a_partial_call_that_was_made_anew_holds_is_watched() -> None:
    module: Any = nn.Linear(1, 1)
    module.call = functools.partial(max, [1.0])
    watch = ModuleWatch(module, {})
    module.call = functools.partial(max, [1.0])
    assert watch.change() is None
    module.call.args[0][0] = 2.0
    assert watch.change() is not None


def test_an_engine_and_a_metric_that_a_module_holds_are_none_of_its_forward() -> None:
    metric = MeanMetric()
    engine = start(Two())
    watch = ModuleWatch(Holds([metric, engine]), {})
    metric.update(2.0)
    three_calls(engine, ROWS)
    assert watch.change() is None


@pytest.mark.parametrize("run", [three_calls, one_call], ids=["three", "one"])
def test_a_number_of_a_module_in_a_plain_list_is_followed(run: Any) -> None:
    scale = Scale()
    engine = start(Holds([scale]), optimizer={"type": "AdamW", "params": {"lr": 0.0}})
    seen = [run(engine, torch.ones(8, 4)).item() for _ in range(4)]
    scale.by = 5.0
    assert [*seen, run(engine, torch.ones(8, 4)).item()] == [1.0] * 4 + [5.0]


def _hooks(module: nn.Module) -> int:
    names = (
        "_forward_pre_hooks _forward_hooks _state_dict_hooks _load_state_dict_pre_hooks "
        "_load_state_dict_post_hooks _forward_pre_hooks_with_kwargs _forward_hooks_always_called"
    )
    return sum(len(getattr(part, name)) for part in module.modules() for name in names.split())


@pytest.mark.parametrize("engine_class", [spmdzero.Engine, ClientEngine])
@pytest.mark.parametrize("copied", [False, True], ids=["the module", "a copy of a copy"])
def test_engines_that_are_gone_leave_no_hooks_to_the_next(engine_class: Any, copied: bool) -> None:
    model: nn.Module = Two()
    counts = []
    for _ in range(3):
        engine = spmdzero.initialize(model=model, config=config(), engine_class=engine_class)[0]
        counts.append(_hooks(model))
        model = copy.deepcopy(engine.module) if copied else engine.module
        del engine
        gc.collect()
    assert counts == counts[:1] * 3
    assert counts[0] > 0


def test_an_engine_that_lives_keeps_its_hooks_beside_another_of_its_module() -> None:
    first = start(Two())
    second = start(first.module)
    for _ in range(2):
        first.module.load_state_dict(Two().state_dict())
    assert _hooks(first.module) == 2 * _hooks(start(Two()).module)
    assert second.module is first.module
