"""`optimizer.state[parameter]` has the count of updates, as torch's optimizers do."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from tests.engine.test_reset_states import LR, Two
from tests.support.engines import assert_trained_as, one_call, start, three_calls

pytestmark = pytest.mark.backends("jax", "torch_xla")

ROWS = torch.randn(9, 8, 4, generator=torch.Generator().manual_seed(0))


def _model() -> Two:
    torch.manual_seed(0)
    return Two()


def _engine(kind: str = "Adam", **more: Any) -> spmdzero.Engine:
    params = {"lr": LR} | ({"adam_w_mode": False} if kind == "Adam" else {})
    more.setdefault("zero_optimization", {"stage": 1})
    return start(
        _model(),
        optimizer={"type": kind, "params": params},
        gradient_clipping=0.0,
        spmd={"min_shard_elements": 0},
        **more,
    )


def _counts(engine: spmdzero.Engine) -> list[float]:
    return [float(state["step"]) for state in engine.optimizer.state.values()]


@pytest.mark.parametrize("run", [one_call, three_calls])
@pytest.mark.parametrize("stage", [0, 3])
def test_each_parameter_has_the_count_of_the_state_dict(run: Callable, stage: int) -> None:
    engine = _engine(zero_optimization={"stage": stage})
    assert _counts(engine) == [0.0] * 4
    for number in range(4):
        run(engine, ROWS[number])
        assert _counts(engine) == [engine.global_steps] * 4
    saved = engine.optimizer.state_dict()["state"]
    for own, state in zip(saved.values(), engine.optimizer.state.values(), strict=True):
        assert set(own) == set(state)
        assert torch.equal(own["step"], state["step"])
        assert own["step"].dtype == state["step"].dtype
        assert str(state["step"].device) == "cpu"


def test_a_skipped_step_is_not_counted() -> None:
    engine = _engine(bf16={"enabled": True})
    rows = ROWS.bfloat16()
    three_calls(engine, rows[0], rows[1] * float("inf"), rows[2])
    assert engine.global_steps == 3
    assert _counts(engine) == [2.0] * 4


def test_a_deleted_state_counts_from_zero() -> None:
    engine = _engine()
    three_calls(engine, *ROWS[:3])
    del engine.optimizer.state[engine.module.first.weight]
    three_calls(engine, *ROWS[3:5])
    # The mapping has the order of assignment, as a dict.
    counts = {name: engine.optimizer.state[p]["step"] for name, p in _named(engine)}
    assert counts == {"first.weight": 2, "first.bias": 5, "second.weight": 5, "second.bias": 5}


def _named(engine: spmdzero.Engine) -> list[tuple[str, nn.Parameter]]:
    return list(engine.module.named_parameters())


@pytest.mark.parametrize("run", [one_call, three_calls])
@pytest.mark.parametrize("count", [0, 40])
def test_a_count_that_is_set_is_the_one_of_the_next_updates(run: Callable, count: int) -> None:
    def set_it(model: Two, optimizer: Any) -> None:
        optimizer.state[model.first.weight]["step"] = torch.tensor(float(count))

    plain, engine = _model(), _engine()
    optimizer = torch.optim.Adam(plain.parameters(), lr=LR)
    for number, rows in enumerate(ROWS):
        if number == 4:
            set_it(plain, optimizer)
            set_it(engine.module, engine.optimizer)
            assert engine.optimizer.state[engine.module.first.weight]["step"] == count
        plain(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        run(engine, rows)
    # Adam divides by the root of squares, where fp32's last digits of a gradient weigh more.
    assert_trained_as(engine, plain, rtol=1e-4, atol=1e-5)
    theirs = [float(optimizer.state[p]["step"]) for p in plain.parameters()]
    assert _counts(engine) == theirs == [count + 5, 9, 9, 9]


def test_states_that_are_assigned_as_they_are_change_nothing() -> None:
    # As clients do that move an optimizer's states to a device.
    engine, other = _engine(), _engine()
    for made in (engine, other):
        three_calls(made, *ROWS[:3])
    states = engine.optimizer.state
    for parameter, own in states.items():
        states[parameter] = type(own)(dict(own))
    engine.optimizer.state = dict(states)
    assert engine.optimizer.reset_at == {}
    for made in (engine, other):
        three_calls(made, *ROWS[3:5])
    for one, same in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one.cpu(), same.cpu())
    assert _counts(engine) == [5.0] * 4


def test_a_write_that_could_not_reach_the_count_is_refused() -> None:
    engine = _engine()
    three_calls(engine, ROWS[0])
    state = engine.optimizer.state[engine.module.first.weight]
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        state["step"].zero_()
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="an update needs the count"):
        del state["step"]
    assert _counts(engine) == [1.0] * 4


def test_a_copy_is_made_of_dicts() -> None:
    engine = _engine()
    three_calls(engine, ROWS[0])
    weight = engine.module.first.weight
    copied = copy.deepcopy(engine.optimizer.state[weight])
    assert type(copied) is dict
    assert list(copied) == ["step", "exp_avg", "exp_avg_sq"]
    assert copied["step"] == 1
    assert type(copy.copy(engine.optimizer.state)[weight]) is dict
    step = engine.optimizer.state[weight]["step"]
    assert pickle.loads(pickle.dumps(step)) == 1


def test_states_answer_as_torchs_dicts() -> None:
    engine = _engine()
    three_calls(engine, ROWS[0])
    states = engine.optimizer.state
    weight = engine.module.first.weight
    assert states is engine.optimizer.state
    assert len(states) == 4
    assert weight in states
    assert nn.Parameter(torch.zeros(1)) not in states
    assert len(states) == 4
    assert len(states[weight]) == 3
    assert "step" in states[weight]
    assert states[weight].get("step") == 1
    states[weight].clear()
    assert "step" not in states[weight]
    assert not states[weight]
    three_calls(engine, ROWS[1])
    assert states[weight]["step"] == 1


def test_a_rule_without_counts_has_none() -> None:
    # Torch's RMSprop has its own among its states.
    engine = _engine("Lion")
    three_calls(engine, ROWS[0])
    assert set(engine.optimizer.state[engine.module.first.weight]) == {"exp_avg"}
