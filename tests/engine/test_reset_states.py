"""Optimizer states that a script clears start anew, as torch's do (ReLoRA resets them so)."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdzero.utils import safe_get_full_fp32_param
from torch import nn

import spmdzero
from tests.support.engines import assert_trained_as, one_call, replays, start, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS = torch.randn(12, 8, 4, generator=torch.Generator().manual_seed(0))
LR = 0.05


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def _clear(model: Two, optimizer: Any) -> None:
    optimizer.state.clear()


def _assign(model: Two, optimizer: Any) -> None:
    optimizer.state = collections.defaultdict(dict)


def _delete_all(model: Two, optimizer: Any) -> None:
    for parameter in model.parameters():
        del optimizer.state[parameter]


def _delete_one(model: Two, optimizer: Any) -> None:
    del optimizer.state[model.first.weight]


def _zero_in_place(model: Two, optimizer: Any) -> None:
    optimizer.state[model.first.weight]["exp_avg"].zero_()


def _model() -> Two:
    torch.manual_seed(0)
    return Two()


def _torchs(reset: Any, **adam: Any) -> Two:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, **adam)
    for number, rows in enumerate(ROWS):
        if number in (5, 9):
            reset(model, optimizer)
        model(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _engine(**more: Any) -> spmdzero.Engine:
    more.setdefault("zero_optimization", {"stage": 1})
    return start(
        _model(),
        optimizer={"type": "Adam", "params": {"lr": LR, "adam_w_mode": False}},
        gradient_clipping=0.0,
        spmd={"min_shard_elements": 0},
        **more,
    )


@pytest.mark.parametrize(
    ("run", "reset"),
    [
        (one_call, _clear),
        (three_calls, _delete_one),
        pytest.param(three_calls, _clear, marks=pytest.mark.slow),
        pytest.param(one_call, _delete_one, marks=pytest.mark.slow),
        pytest.param(one_call, _assign, marks=pytest.mark.slow),
        pytest.param(three_calls, _assign, marks=pytest.mark.slow),
        pytest.param(one_call, _delete_all, marks=pytest.mark.slow),
        pytest.param(one_call, _zero_in_place, marks=pytest.mark.slow),
        pytest.param(three_calls, _zero_in_place, marks=pytest.mark.slow),
    ],
)
def test_a_state_that_is_reset_in_mid_run_starts_anew_as_torchs(run: Any, reset: Any) -> None:
    engine = _engine()
    for number, rows in enumerate(ROWS):
        if number in (5, 9):
            reset(engine.module, engine.optimizer)
        run(engine, rows)
    # Adam divides by the root of squares, where fp32's last digits of a gradient weigh more.
    assert_trained_as(engine, _torchs(reset), rtol=1e-4, atol=1e-5)
    assert replays(engine)


def test_masters_keep_their_digits_when_states_are_cleared() -> None:
    engine = _engine(bf16={"enabled": True})
    rows = ROWS.bfloat16()
    three_calls(engine, rows[0])
    before = safe_get_full_fp32_param(engine.module.first.weight).clone()
    engine.optimizer.state.clear()
    engine.optimizer.renew()
    assert torch.equal(safe_get_full_fp32_param(engine.module.first.weight), before)
    # Otherwise it would be what bf16 leaves of it.
    assert not torch.equal(before, before.bfloat16().float())


@pytest.mark.parametrize("run", [one_call, three_calls])
def test_loaded_counts_reach_a_step_that_is_not_traced_anymore(run: Any) -> None:
    engine, other = _engine(), _engine()
    for rows in ROWS[:5]:
        run(engine, rows)
        run(other, rows)
    saved = engine.optimizer.state_dict()
    # Biases keep their moments and count from 1.
    for number in (1, 3):
        saved["state"][number]["step"] = torch.tensor(1.0)
    engine.optimizer.load_state_dict(saved)
    fresh = _engine()
    fresh.module.load_state_dict(other.module.state_dict())
    fresh.optimizer.load_state_dict(saved)
    run(engine, ROWS[5])
    run(fresh, ROWS[5])
    assert_trained_as(engine, fresh.module.cpu())


def test_what_was_reset_apart_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    engine = _engine()
    three_calls(engine, *ROWS[:5])
    _delete_one(engine.module, engine.optimizer)
    three_calls(engine, *ROWS[5:7])
    engine.save_checkpoint(tmp_path)
    other = _engine()
    other.load_checkpoint(tmp_path)
    third = _engine()
    third.optimizer.load_state_dict(engine.optimizer.state_dict())
    assert engine.optimizer.reset_at == {"first.weight": 5}
    assert other.optimizer.reset_at == third.optimizer.reset_at == {"first.weight": 5}
    three_calls(engine, *ROWS[7:9])
    three_calls(other, *ROWS[7:9])
    for one, same in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one.cpu(), same.cpu())
    with pytest.raises(spmdzero.SpmdZeroError, match=r"first\.weight started anew"):
        engine.save_deepspeed_checkpoint(tmp_path, tag="deepspeed")
