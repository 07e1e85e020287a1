"""A step that raises: it is done again from its first micro-batch, or it is done."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import spmdzero
from tests.support import engines
from tests.support.engines import Mean, one_call, replays, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS = 8
GOOD, BAD = torch.ones(ROWS, 4), torch.full((ROWS, 4), math.inf)
AT_THE_SMALLEST_SCALE = {
    "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 0, "hysteresis": 1}
}
CHECKED = {"spmd": {"check_finite": True}}


def start(**more: Any) -> spmdzero.Engine:
    usual = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-1}}}
    return engines.start(Mean(), **usual | more)


Run = Callable[..., object]


@pytest.fixture(params=[three_calls, one_call], ids=["three calls", "train_batch"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def counts(engine: spmdzero.Engine) -> tuple[int, ...]:
    return (
        engine.micro_steps,
        engine.global_steps,
        engine.global_samples,
        engine.skipped_steps,
        len(engine.micro_losses),
    )


def weights(engine: spmdzero.Engine) -> torch.Tensor:
    return engine.module.line.weight.detach().cpu().clone()


def assert_starts_anew(
    engine: spmdzero.Engine, run: Run, *failing: torch.Tensor, error: type[Exception]
) -> None:
    """A failing step leaves no trace, and the next one is a whole one; traced, then replayed."""
    good = [GOOD] * engine.gradient_accumulation_steps()
    for step in range(1, 6):
        before, at = counts(engine), weights(engine)
        with pytest.raises(error):
            run(engine, *failing)
        assert (counts(engine), engine.was_step_applied()) == (before, False)
        assert torch.equal(weights(engine), at)
        run(engine, *good)
        passed = (step * len(good), step, step * ROWS * len(good), 0, 0)
        assert (counts(engine), engine.was_step_applied()) == (passed, True)
        assert not torch.equal(weights(engine), at)


def test_an_overflow_at_the_smallest_scale_starts_the_step_anew(run: Run) -> None:
    engine = start(**AT_THE_SMALLEST_SCALE, gradient_accumulation_steps=2)
    assert_starts_anew(engine, run, GOOD, BAD, error=spmdzero.SpmdZeroRuntimeError)
    assert engine.optimizer.skipped_steps == 0
    assert replays(engine)


def test_a_loss_that_is_not_finite_starts_the_step_anew(run: Run) -> None:
    engine = start(**CHECKED, gradient_accumulation_steps=2)
    assert_starts_anew(engine, run, GOOD, BAD, error=spmdzero.NonFiniteError)
    # At its first micro-batch, too.
    before = counts(engine)
    with pytest.raises(spmdzero.NonFiniteError):
        run(engine, BAD, GOOD)
    assert counts(engine) == before


def test_a_failed_step_of_the_callers_own_accumulation_counts_no_samples() -> None:
    engine = start(**CHECKED, managed_gradient_accumulation=False)
    assert_starts_anew(engine, three_calls, BAD, error=spmdzero.NonFiniteError)


def test_a_failed_step_whose_end_the_caller_named_counts_no_micro_batch() -> None:
    engine = start(**CHECKED)
    engine.set_gradient_accumulation_boundary(False)
    three_calls(engine, GOOD, GOOD)
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(spmdzero.NonFiniteError):
        three_calls(engine, BAD)
    assert counts(engine) == (0, 0, 0, 0, 0)


def test_an_update_that_raises_leaves_no_half_of_a_step() -> None:
    engine = start(gradient_accumulation_steps=2)
    three_calls(engine, GOOD, GOOD)
    at = weights(engine)
    stranger = nn.Parameter(torch.zeros(4, device=engine.device))
    engine.optimizer.param_groups[0]["params"].append(stranger)
    with pytest.raises(
        spmdzero.SpmdZeroUsageError, match=r"shape \[4\] that initialize was not given"
    ):
        three_calls(engine, GOOD, GOOD)
    assert (counts(engine), engine.was_step_applied()) == ((2, 1, 16, 0, 0), False)
    assert torch.equal(weights(engine), at)
    engine.optimizer.param_groups[0]["params"].pop()
    three_calls(engine, GOOD, GOOD)
    assert (counts(engine), engine.was_step_applied()) == ((4, 2, 32, 0, 0), True)


class FaultError(Exception):
    """What somebody else's code raises."""


def fail(*_: Any, **__: Any) -> None:
    raise FaultError


@contextlib.contextmanager
def failing_hook(engine: spmdzero.Engine) -> Iterator[None]:
    engine.after_step.append(fail)
    yield
    engine.after_step.remove(fail)


FAULTS: dict[str, Callable[[spmdzero.Engine], Any]] = {
    "observer": lambda engine: engine.observe(fail),
    "hook": failing_hook,
    "schedule": lambda engine: mock.patch.object(engine.lr_scheduler, "step", fail),
}


@pytest.mark.parametrize("faulty", FAULTS)
def test_a_step_is_done_whatever_an_observer_a_hook_or_a_schedule_raises(
    run: Run, faulty: str
) -> None:
    engine = start(scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 1e-2}})
    for step in range(1, 6):
        at = weights(engine)
        with FAULTS[faulty](engine), pytest.raises(FaultError):
            run(engine, GOOD)
        passed = (2 * step - 1, 2 * step - 1, (2 * step - 1) * ROWS, 0, 0)
        assert (counts(engine), engine.was_step_applied()) == (passed, True)
        assert not torch.equal(weights(engine), at)
        run(engine, GOOD)
        assert counts(engine)[1] == 2 * step


FAILING: set[str] = set()


class Failing(Mean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FAILING:
            raise ValueError("the user's own error")
        return super().forward(x)


@pytest.mark.backends("jax")
def test_an_error_of_another_engines_forward_comes_before_anything_of_the_step_is_spent() -> None:
    one, twin = start(), start()
    twin.module.load_state_dict(one.module.state_dict())
    waiting, *_ = spmdzero.initialize(model=Failing(), config=one.config)
    for engine in (twin, one):
        engine.backward(engine(GOOD))
    twin.step()
    # Its backward will need values that the program of the other engine's step computes.
    loss = waiting(GOOD)
    FAILING.add("now")
    with pytest.raises(ValueError, match="the user's own error"):
        one.step()
    FAILING.clear()
    one.step()
    assert counts(one) == counts(twin)
    assert torch.equal(weights(one), weights(twin))
    waiting.backward(loss)
    waiting.step()
    assert waiting.global_steps == 1


def test_what_a_failed_check_reads_is_not_counted_as_the_scripts() -> None:
    engine = start(**CHECKED)
    with pytest.raises(spmdzero.NonFiniteError):
        three_calls(engine, BAD)
    assert (engine.programs.script_reads, engine.programs.engine_reads) == (0, 3)
