"""A replayed step is the traced step: the same losses, the same state, bit for bit."""

import logging
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays, counters, current, runtime
from spmdzero.errors import NonFiniteError, SpmdZeroUsageError
from tests.engine.captured import (
    ROWS,
    WIDTH,
    assert_same,
    assert_same_state,
    batches,
    between_checks,
    captured,
    make_engine,
    state,
    train,
)
from tests.support.selected import outside

pytestmark = pytest.mark.backends("jax")

STEPS = 100
WARMUP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 80, "warmup_num_steps": 20}}
FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 10, "hysteresis": 1}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_clipping": 0.5, "scheduler": WARMUP},
    "bf16 accumulated": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3},
    "stage 1 accumulated": {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2},
    "fp16 overflow": {"fp16": FP16, "gradient_clipping": 0.5, "scheduler": WARMUP},
    "fp16 overflow at stage 0": {
        "fp16": FP16,
        "gradient_clipping": 0.5,
        "scheduler": WARMUP,
        "zero_optimization": {"stage": 0},
    },
    "global forward": {"spmd": {"forward": "global"}},
    "unmanaged": {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=outside(["fp32"], case)) for case in CASES]
)
def test_a_hundred_replayed_steps_are_the_traced_ones(case: str) -> None:
    traced, replayed = make_engine(capture=False, **CASES[case]), make_engine(**CASES[case])
    losses = []
    for engine in (traced, replayed):
        torch.manual_seed(3)
        # A global forward draws from the devices' own generator.
        runtime.seed(3)
        # A length of no other test: what donates is counted when a program is compiled.
        losses.append(train(engine, STEPS, length=5))
    assert_same(losses[0], losses[1])
    assert_same_state(traced, replayed)
    micros = traced.gradient_accumulation_steps()
    # Five traces at most: the first two may find less state than the third.
    capture = replayed.capture
    assert capture.compared + capture.traced <= 5
    assert capture.replayed == STEPS * micros - capture.compared - capture.traced
    # A step that is traced on JAX gives away the memory of the key of its draws too, and of the
    # loss scale that the host uploads.
    uploaded = (1 + ("fp16" in CASES[case])) if current().name == "jax" else 0
    assert traced.donated_inputs.keys() == replayed.donated_inputs.keys()
    for kind, count in traced.donated_inputs.items():
        assert count - uploaded <= replayed.donated_inputs[kind] <= count
    if case.startswith("fp16 overflow"):
        assert replayed.skipped_steps > 3


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    return captured(make_engine())


def test_dropout_follows_the_seed_and_varies_from_step_to_step(engine: spmdzero.Engine) -> None:
    (same,) = batches(1)
    kept = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    runtime.sync()
    losses = []
    for seed in (5, 5, 6):
        engine.module.load_state_dict(kept)
        torch.manual_seed(seed)
        losses.append(engine.train_batch(iter([same])).item())
    assert losses[0] == losses[1] != losses[2]
    assert engine.capture.reason is None


def test_two_steps_on_one_batch_drop_other_elements(engine: spmdzero.Engine) -> None:
    (group,) = engine.optimizer.param_groups
    (same,), lr = batches(1), group["lr"]
    group["lr"] = 0.0
    losses = [engine.train_batch(iter([same])).item() for _ in range(3)]
    group["lr"] = lr
    assert engine.capture.reason is None
    assert len(set(losses)) == 3


def test_what_is_written_between_steps_is_used(engine: spmdzero.Engine) -> None:
    weight = engine.module.blocks[0][1].weight
    with torch.no_grad():
        weight.zero_()
    train(engine, 1)
    assert engine.capture.reason is None
    # AdamW moves a weight by about lr at most.
    assert weight.detach().cpu().abs().max() < 0.05


def test_a_value_computed_from_old_weights_outlives_their_buffers(engine: spmdzero.Engine) -> None:
    weight = engine.module.blocks[0][1].weight
    before = weight.detach().cpu().clone()
    doubled = weight.detach() * 2
    train(engine, 1)
    assert engine.capture.reason is None
    assert torch.equal(doubled.cpu(), before * 2)


def test_replaying_compiles_and_reads_nothing(engine: spmdzero.Engine) -> None:
    between_checks(engine)
    compiled, reads = counters.compiled()[0], counters.host_reads()
    source = batches(5)
    for _ in range(5):
        engine.train_batch(source)
    assert counters.host_reads() == reads
    assert counters.compiled()[0] == compiled
    assert engine.capture.reason is None


def test_a_progress_bar_costs_one_read_each_time_that_it_is_drawn(engine: spmdzero.Engine) -> None:
    between_checks(engine)
    source, reads = batches(15), counters.host_reads()
    for step in range(15):
        loss = engine.train_batch(source)
        if step % 5 == 4:
            assert loss.item() > 0
    assert engine.capture.reason is None
    assert counters.host_reads() == reads + 3


def test_parameters_stay_whole_and_moments_shards(engine: spmdzero.Engine) -> None:
    train(engine, 2)
    tensors = engine.named_tensors()
    assert arrays.sharding_of(tensors["parameter/blocks.0.1.weight"]) == "{replicated}"
    assert "devices" in arrays.sharding_of(tensors["exp_avg/blocks.0.1.weight"])


def test_ledgers_are_recorded_of_a_traced_step_that_changes_nothing() -> None:
    other, watched = captured(make_engine()), captured(make_engine())
    torch.manual_seed(4)
    train(other, 1, length=9)
    train(other, 1, first=1)
    torch.manual_seed(4)
    with spmdzero.record_ledgers(watched) as ledgers:
        train(watched, 1, length=9)
    assert watched.capture.reason == "somebody reads the step's program"
    assert ledgers.boundary.aliased == watched.donated_inputs["boundary"]
    train(watched, 1, first=1)
    assert watched.capture.reason is None
    assert_same_state(other, watched)


def test_hooks_after_a_step_see_its_loss(engine: spmdzero.Engine) -> None:
    seen: list[float] = []

    def look() -> None:
        seen.extend(loss.item() for loss in engine.micro_losses)

    engine.after_step.append(look)
    losses = train(engine, 2)
    engine.after_step.remove(look)
    assert seen == losses


def test_a_loss_that_is_not_finite_is_refused_before_the_update() -> None:
    engine = captured(make_engine(spmd={"check_finite": True}))
    steps, before = engine.global_steps, state(engine)
    bad = torch.full((ROWS, 4, WIDTH), float("nan"))
    with pytest.raises(NonFiniteError, match=f"loss is nan at step {steps}"):
        engine.train_batch(iter([(bad,)]))
    after = state(engine)
    for name in after:
        if not name.startswith(("buffer/", "counter/")):
            assert torch.equal(before[name], after[name]), name
    assert engine.global_steps == steps
    assert train(engine, 1)[0] > 0


def test_capture_false_traces_each_step(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(capture=False)
    with caplog.at_level(logging.INFO, "spmdzero"):
        train(engine, 5)
    assert (engine.capture.replayed, engine.capture.traced) == (0, 5)
    assert "train_batch" not in caplog.text


def test_train_batch_inside_no_sync_is_refused() -> None:
    engine = make_engine(zero_optimization={"stage": 1})
    with engine.no_sync(), pytest.raises(SpmdZeroUsageError, match=r"train_batch.*no_sync"):
        engine.train_batch(batches(1))
