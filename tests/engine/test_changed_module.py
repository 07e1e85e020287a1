"""A module that is changed after `initialize`: frozen, unfrozen, given parameters, used again."""

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.integrations._client_engine import ClientEngine
from tests.support.engines import config, one_call, start, three_calls

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
