"""Steps of the three calls whose program is started again, with only their beginning recorded."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmdzero
from tests.engine.captured import (
    Residual,
    assert_same_state,
    assert_twins_agree,
    batches,
    make_engine,
    three_calls,
    twins,
)

pytestmark = pytest.mark.backends("jax")
STEPS = 8
Between = Callable[[spmdzero.Engine, torch.Tensor, int], Any]


class Tanh(Residual):
    """Like `Residual`, with one operation more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


def run(engine: spmdzero.Engine, between: Between, factor: Callable[[int], float]) -> list[float]:
    """The losses of `STEPS` steps, with `between` called after each backward."""
    torch.manual_seed(1)
    losses = []
    for step, (x,) in enumerate(batches(STEPS * engine.gradient_accumulation_steps())):
        loss = engine(x) * factor(step)
        engine.backward(loss)
        between(engine, loss, step)
        engine.step()
        losses.append(loss.item())
    return losses


def nothing(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
    pass


def compare(
    between: Between = nothing, factor: Callable[[int], float] = lambda _: 2.0, **more: Any
) -> int:
    """Compares with steps that are traced; returns how many programs were started again."""
    traced, folded = twins(**more)
    assert run(traced, between, factor) == run(folded, between, factor)
    assert_same_state(traced, folded)
    assert folded.capture.traced == 0
    return folded.capture.ends.repeated


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"bf16": {"enabled": True}, "gradient_clipping": 0.5},
        {"fp16": {"enabled": True, "initial_scale_power": 40}},
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        {"zero_optimization": {"stage": 0}},
    ],
    ids=["fp32", "bf16", "fp16", "stage 3", "stage 0"],
)
def test_all_steps_but_the_first_two_start_a_known_program(more: dict[str, Any]) -> None:
    assert compare(**more) >= STEPS - 3


def test_micro_batches_within_a_step_have_a_program_of_their_own() -> None:
    # Each of both has two micro-batches to learn from.
    assert compare(gradient_accumulation_steps=2) >= 2 * STEPS - 6


def test_micro_batches_that_no_step_ends_start_a_known_program_too() -> None:
    def accumulate(engine: spmdzero.Engine) -> list[float]:
        # As accelerate does: only the last micro-batch is followed by a step.
        losses = []
        for index, (x,) in enumerate(batches(2 * STEPS)):
            engine.set_gradient_accumulation_boundary(index % 2 == 1)
            loss = engine(x)
            engine.backward(loss)
            if index % 2:
                engine.step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    engines = traced, folded = twins(gradient_accumulation_steps=2)
    torch.manual_seed(1)
    expected = accumulate(traced)
    torch.manual_seed(1)
    assert accumulate(folded) == expected
    assert_same_state(*engines)
    assert folded.capture.ends.repeated >= 2 * STEPS - 6


def test_nothing_is_compiled_twice() -> None:
    # A program that no test before it, in the same process, has compiled.
    engine = make_engine(Tanh())
    three_calls(engine, STEPS)
    assert engine.capture.ends.repeated >= STEPS - 3
    assert sum(c.count for c in engine.programs.compilations) == 1


def test_another_operation_of_the_script_has_another_program() -> None:
    # Three factors, of which each comes back.
    repeated = compare(factor=lambda step: 1.0 + (step // 3))
    assert 0 < repeated < STEPS


def test_a_parameter_that_is_written_before_step_is_used_as_written() -> None:
    def halve(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        if step >= 4:
            with torch.no_grad():
                next(engine.module.parameters()).mul_(0.5)

    assert compare(halve) >= 1


def test_a_parameter_that_is_replaced_by_its_data_is_used() -> None:
    def assign(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        weight = next(engine.module.parameters())
        if step == 5:
            weight.data = weight.detach().clone() * 0.5

    assert compare(assign) >= 1


def test_a_gradient_that_is_read_is_that_of_the_traced_step() -> None:
    norms: list[float] = []

    def read(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        grad = next(engine.module.parameters()).grad
        assert grad is not None
        norms.append(grad.norm().item())

    compare(read)
    assert norms[:STEPS] == norms[STEPS:]


def test_a_gradient_that_is_written_counts() -> None:
    def clip(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        for parameter in engine.module.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)

    compare(clip)


def test_gradients_that_are_dropped_before_step_are_zero() -> None:
    def drop(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        if step == 5:
            engine.module.zero_grad()
            engine.backward(engine(torch.ones(16, 4, 16)))

    compare(drop)


def test_a_loss_that_is_read_before_step_has_the_gradients_recorded() -> None:
    read: list[float] = []

    def item(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        read.append(loss.item())

    assert compare(item) == 0
    assert read[:STEPS] == read[STEPS:]


def test_a_second_backward_joins_the_first() -> None:
    def again(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        engine.backward(engine(torch.ones(16, 4, 16)))

    compare(again)


def test_what_the_script_holds_of_the_state_stays_as_it_is() -> None:
    engine = make_engine()
    three_calls(engine, 4)
    weight = next(engine.module.parameters())
    follows, stays = weight.detach(), weight.detach().clone()
    before = weight.detach().cpu()
    # The first of these steps computes the clone too.
    three_calls(engine, 1, first=4)
    repeated = engine.capture.ends.repeated
    three_calls(engine, 2, first=5)
    assert engine.capture.ends.repeated == repeated + 2
    assert torch.equal(stays.cpu(), before)
    assert torch.equal(follows.cpu(), weight.detach().cpu())
    assert not torch.equal(follows.cpu(), before)


def test_states_that_are_cleared_start_anew() -> None:
    def clear(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        if step == 5:
            engine.optimizer.state.clear()

    assert compare(clear) >= 1


def test_states_that_are_cleared_are_freed() -> None:
    engine = make_engine()
    three_calls(engine, 4)
    assert engine.capture.ends.repeated
    before = weakref.ref(next(iter(engine.optimizer.state.values()))["exp_avg"])
    engine.optimizer.state.clear()
    three_calls(engine, 1, first=4)
    gc.collect()
    assert before() is None


def test_a_frozen_group_and_other_numbers_of_groups_are_followed() -> None:
    def change(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        (group,) = engine.optimizer.param_groups
        group["lr"] = 1e-2 / (step + 1)
        group["weight_decay"] = 0.1 * (step > 4)

    assert compare(change) >= STEPS - 4


def test_retrace_has_every_program_learned_again() -> None:
    engine = make_engine()
    three_calls(engine, 5)
    repeated = engine.capture.ends.repeated
    engine.retrace()
    three_calls(engine, 1, first=5)
    assert engine.capture.ends.repeated == repeated
    three_calls(engine, 3, first=6)
    assert engine.capture.ends.repeated > repeated


def test_an_output_that_the_script_keeps_is_computed() -> None:
    kept: list[torch.Tensor] = []

    def keep(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        kept.append(loss.detach() * 3)

    assert compare(keep) >= STEPS - 3
    assert [k.item() for k in kept[:STEPS]] == [k.item() for k in kept[STEPS:]]


def test_an_average_that_begins_after_the_program_is_known_keeps_what_it_took() -> None:
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(engine: spmdzero.Engine, loss: torch.Tensor, step: int) -> None:
        if step >= 5:
            weight = next(engine.module.parameters()).detach()
            average = torch.zeros_like(weight)
            # Both hold the same memory until one is written.
            average.copy_(weight)
            taken.append((average, weight.cpu()))

    assert compare(copy) >= 1
    assert all(torch.equal(average.cpu(), then) for average, then in taken)


def test_a_micro_batch_whose_end_the_caller_names_needs_no_accumulator() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = []
        for step, (x,) in enumerate(batches(8)):
            engine.set_gradient_accumulation_boundary(step % 2 == 1)
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engines = twins()
    assert_twins_agree(engines, run)
    assert engines[1].global_steps == 4
