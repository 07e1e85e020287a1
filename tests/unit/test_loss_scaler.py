"""The loss scale, step for step as DeepSpeed 0.19.8 recorded it."""

import json
from pathlib import Path

import pytest

from spmdzero.config import Fp16Config
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.precision import LossScaler

pytestmark = pytest.mark.backends("any")

TABLES = json.loads((Path(__file__).parents[1] / "data" / "loss_scaler_tables.json").read_text())


@pytest.mark.parametrize("name", TABLES)
def test_dynamic_scale_follows_deepspeed(name: str) -> None:
    settings = json.loads(name.partition(":")[2])
    scaler = LossScaler(
        cur_scale=settings["init_scale"],
        dynamic=True,
        scale_window=settings["scale_window"],
        min_scale=settings["min_scale"],
        delayed_shift=settings["delayed_shift"],
        cur_hysteresis=settings["delayed_shift"],
        consecutive_hysteresis=settings["consecutive_hysteresis"],
    )
    for overflow, *expected in TABLES[name]["rows"]:
        if isinstance(expected[0], str):
            with pytest.raises(SpmdZeroRuntimeError, match="already at minimum"):
                scaler.update_scale(bool(overflow))
            return
        promised = scaler.scale_if_applied()
        scaler.update_scale(bool(overflow))
        if not overflow:
            assert scaler.cur_scale == promised
        now = [
            scaler.cur_scale,
            scaler.cur_hysteresis,
            scaler.cur_iter,
            scaler.last_overflow_iter,
        ]
        assert now == expected


def test_a_static_scale_stays() -> None:
    scaler = LossScaler.from_config(Fp16Config(enabled=True, loss_scale=128.0), stage=2)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
    assert (scaler.cur_scale, scaler.scale_if_applied(), scaler.dynamic) == (128.0, 128.0, False)


def test_a_dynamic_scale_starts_at_its_power_of_two() -> None:
    fp16 = Fp16Config(enabled=True, initial_scale_power=12, hysteresis=3, loss_scale_window=7)
    scaler = LossScaler.from_config(fp16, stage=2)
    assert (scaler.cur_scale, scaler.cur_hysteresis, scaler.scale_window) == (4096.0, 3, 7)
