"""Loss scale and skipped steps after each of a list of gradients, written by `safe_set_full_grad`.

The rows are those of real DeepSpeed 0.19.8, live on one gloo rank with the same calls, at stages 1
and 2 alike; at stage 0, where it halves at each overflow, with the gradients written into `grad`.
"""

from math import inf, nan
from typing import Any

import pytest
import torch
from spmdzero.utils import safe_set_full_grad
from torch import nn

import spmdzero
from tests.support import engines

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

FINE = 0.05
GRADIENTS = {
    "none": [FINE] * 6,
    "all": [inf, -inf, *[nan] * 6],
    "some": [inf, nan, FINE, FINE, FINE, inf],
}
SKIPPED = {
    "none": [0] * 6,
    "all": [1, 2, 3, 4, 5, 6, 7, 8],
    "some": [1, 2, 2, 2, 2, 3],
}
# Of a window of 2 steps, by the hysteresis.
SCALES = {
    ("none", 1): [256, 256, 512, 512, 1024, 1024],
    ("none", 2): [256, 256, 512, 512, 1024, 1024],
    ("all", 1): [128, 64, 32, 16, 8, 4, 2, 1],
    ("all", 2): [256, 128, 64, 32, 16, 8, 4, 2],
    ("some", 1): [128, 64, 64, 64, 128, 64],
    ("some", 2): [256, 128, 128, 128, 256, 256],
}


def start(stage: int, **precision: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    return engines.start(nn.Linear(4, 4), zero_optimization={"stage": stage}, **precision)


def step(engine: spmdzero.Engine, gradient: float) -> None:
    x = torch.ones(8, 4, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().pow(2).mean())
    for parameter in engine.module.parameters():
        safe_set_full_grad(parameter, torch.full(parameter.shape, gradient))
    engine.step()


def is_finite(engine: spmdzero.Engine) -> bool:
    return all(bool(p.detach().cpu().isfinite().all()) for p in engine.module.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("overflows", "hysteresis"), SCALES)
def test_fp16_scales_and_skips(overflows: str, hysteresis: int, stage: int) -> None:
    fp16 = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": hysteresis}
    engine = start(stage, fp16={"enabled": True} | fp16)
    optimizer: Any = engine.optimizer
    assert optimizer.dynamic_loss_scale
    assert (optimizer.loss_scaler.cur_scale, optimizer.loss_scaler.scale_window) == (256, 2)
    scales = SCALES[overflows, hysteresis if stage else 1]
    rows = zip(GRADIENTS[overflows], scales, SKIPPED[overflows], strict=True)
    for iteration, (gradient, scale, skipped) in enumerate(rows, start=1):
        step(engine, gradient)
        scaler = optimizer.loss_scaler
        assert (scaler.cur_scale, scaler.cur_iter) == (scale, iteration)
        assert (optimizer.cur_scale, optimizer.overflow) == (scale, gradient != FINE)
        assert (engine.skipped_steps, is_finite(engine)) == (skipped, True)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overflows", GRADIENTS)
def test_bf16_skips_where_it_checks(overflows: str, stage: int) -> None:
    checked = start(stage, bf16={"enabled": True})
    unchecked = start(stage, bf16={"enabled": True, "check_grad_overflow": False})
    for gradient, skipped in zip(GRADIENTS[overflows], SKIPPED[overflows], strict=True):
        step(checked, gradient)
        assert (checked.skipped_steps, is_finite(checked)) == (skipped, True)
        step(unchecked, gradient)
        assert (unchecked.skipped_steps, is_finite(unchecked)) == (0, overflows == "none")
