"""The three calls as operations of the step: the same numbers and program, and when they trace."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.backend import arrays, counters, programs, runtime
from spmdzero.errors import SpmdZeroUsageError
from tests.engine.captured import (
    ROWS,
    WAYS,
    WIDTH,
    Residual,
    assert_twins_agree,
    batches,
    make_engine,
    three_calls,
    train,
    twins,
)
from tests.support.bounds import summed

pytestmark = pytest.mark.backends("jax")

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}
CONFIGS = {
    "fp32": {"gradient_clipping": 0.1, "scheduler": SCHEDULE},
    "accumulation at stage 1 over two axes": {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "spmd": {"mesh": {"data": 2, "fsdp": -1}},
    },
    "bf16 accumulated at stage 2": {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "scheduler": SCHEDULE,
    },
    "fp16 with overflows": {
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
        "gradient_clipping": 0.1,
    },
    "fp16 with overflows at stage 0": {
        "fp16": {"enabled": True, "initial_scale_power": 24},
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 0},
    },
    "SGD at stage 0": {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 0},
    },
    "Lamb with explicit reduction": {
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-2}},
        "zero_allow_untested_optimizer": True,
        "spmd": {"reduction": "explicit"},
    },
}


# What the others show together, and rarer ways.
SLOW = [
    *("fp16 with overflows at stage 0", "Lamb with explicit reduction", "SGD at stage 0"),
    *("accumulation at stage 1 over two axes", "fp32"),
]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, config in CONFIGS.items()
    ],
)
def test_folded_steps_are_traced_steps_bit_for_bit(config: dict[str, Any]) -> None:
    traced, folded = engines = twins(**config)
    # A length of no other test: what donates is counted when a program is compiled.
    assert_twins_agree(engines, lambda engine: three_calls(engine, 8, length=3))
    assert (traced.capture.replayed, folded.capture.traced) == (0, 0)
    if "fp16" in config:
        assert folded.skipped_steps > 0
    assert folded.donated_inputs == traced.donated_inputs


class Checkpointed(Residual):
    """Runs its first block once and its second again in backward, by torch's own checkpoint."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](x)
        return (h + checkpoint(self.blocks[1], h, use_reentrant=self.reentrant)).pow(2).mean()


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize(
    ("module", "recompute"),
    [
        (Checkpointed, "nothing"),
        pytest.param(Reentrant, "nothing", marks=pytest.mark.slow),
        (Residual, {"blocks.*": "everything"}),
        pytest.param(Residual, {"blocks.0": "dots"}, marks=pytest.mark.slow),
    ],
)
def test_what_backward_runs_again_folds_with_the_masks_of_the_forward(
    module: Callable[[], nn.Module], recompute: Any
) -> None:
    traced, folded = engines = twins(module, spmd={"recompute": recompute})
    assert_twins_agree(engines, lambda engine: three_calls(engine, 6))
    assert (traced.capture.replayed, folded.capture.traced) == (0, 0)


class HostMade(Residual):
    """Uploads a tensor that it makes on the CPU at each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.linspace(0.5, 1.5, WIDTH).to(x.device))


@pytest.mark.parametrize(
    "module", [pytest.param(Residual, marks=pytest.mark.slow), HostMade, Checkpointed]
)
def test_the_compiled_program_is_that_of_a_traced_step(module: Callable[[], nn.Module]) -> None:
    counts = []
    for engine in twins(module):
        three_calls(engine, 2)
        (x,) = next(batches(1))
        loss = engine(x)
        engine.backward(loss)
        engine.optimizer.folds.wanted = engine.capture.before_update()
        engine.optimizer.step()
        tensors = [*engine.named_tensors().values(), engine.optimizer.grad_norm]
        pending = [
            t
            for t, is_pending in zip(tensors, arrays.are_pending(tensors), strict=True)
            if is_pending
        ]
        text = programs.optimized_hlo(pending)
        counts.append(Counter(re.findall(r"= \S+ ([a-z-]+)\(", text)))
    traced, folded = counts
    # A recomputed forward would have more products, a lost annotation other collectives.
    assert traced["dot"] > 7
    for operation in ("dot", "fusion", "all-reduce", "all-gather", "reduce-scatter", "exponential"):
        assert folded[operation] == traced[operation], operation


def test_a_step_that_is_watched_first_is_no_recompilation() -> None:
    engine = make_engine()

    def train(steps: int) -> None:
        # A length of no other test, whose programs would not be compiled again.
        for (x,) in batches(steps, length=7):
            engine.backward(engine(x))
            engine.step()

    with spmdzero.record_ledgers(engine):
        train(1)
    train(2)
    kinds = [compilation.kind for compilation in engine.programs.compilations]
    assert kinds == ["boundary", "captured boundary"]
    assert "recompilation" not in str(engine.doctor())


def test_a_forward_is_folded_alike_whether_lines_are_recorded_or_not() -> None:
    # Recorded as while a loop that compiles at each step is watched: in the third of the traces
    # that are compared.
    engine = make_engine()
    for step, (x,) in enumerate(batches(4)):
        if step == 2:
            programs.record_scopes(True, by=engine)
        try:
            engine.backward(engine(x))
        finally:
            if step == 2:
                programs.record_scopes(False, by=engine)
        engine.step()
    assert (engine.capture.replayed, engine.capture.compared) == (1, 3)


def test_programs_compile_once() -> None:
    engine = make_engine(gradient_accumulation_steps=2)
    three_calls(engine, 1)
    compiled = counters.compiled()[0]
    three_calls(engine, 6)
    assert counters.compiled()[0] == compiled
    assert engine.capture.replayed + engine.capture.compared == 14


class TwoOutputs(nn.Module):
    """Returns predictions and a loss, of which the script may use either."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Linear(32, WIDTH))
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"loss": y.pow(2).mean(), "y": y, "z": self.other(x)}


def test_the_script_chooses_what_is_differentiated() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = []
        for index, (x,) in enumerate(batches(9)):
            out = engine(x)
            loss = (
                out["loss"],
                F.mse_loss(out["y"], x.to(out["y"].device)) + out["z"].abs().mean(),
                out["loss"] + out["y"].mean(),
            )[index % 3]
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engines = twins(TwoOutputs)
    assert_twins_agree(engines, run)
    assert engines[1].capture.traced == 0


def test_a_plain_backward_of_two_forwards() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = []
        for (x,) in batches(5):
            one, other = engine(x), engine(x * 2)
            (one + other).backward()
            engine.step()
            losses.append(one.item())
        return losses

    engines = twins()
    assert_twins_agree(engines, run)
    assert engines[1].capture.traced == 0


def test_gradients_that_wait_unreduced_join_the_next() -> None:
    losses = []
    for engine in twins(zero_optimization={"stage": 1}):
        torch.manual_seed(2)
        losses.append([])
        for (x,) in batches(5):
            with engine.no_sync():
                engine.backward(engine(x))
            loss = engine(x * 2)
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert engine.capture.traced == 0
    # Backward is traced here, apart from the folded forward: XLA may fuse its sums otherwise, and
    # round the last digit of fp32 in another way.
    assert losses[0] == summed(losses[1])


def test_a_step_stays_folded_when_a_value_is_read_before_its_backward() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = []
        for (x,) in batches(4):
            loss = engine(x)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses

    engines = twins()
    assert_twins_agree(engines, run)
    assert engines[1].capture.replayed + engines[1].capture.compared == 4
    # What is read, and the step, unless a test before has compiled them.
    assert all(compilation.step == 0 for compilation in engines[1].programs.compilations)


def test_a_parameter_written_before_backward_is_refused() -> None:
    engine = make_engine()
    (x,) = next(batches(1))
    late = engine(x)
    three_calls(engine, 1)
    with pytest.raises(SpmdZeroUsageError, match="Call backward before step"):
        engine.backward(late)


def test_a_changed_lr_of_a_users_own_optimizer_counts() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = []
        for step in range(4):
            engine.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            losses += three_calls(engine, 1, first=step)
        return losses

    engines = []
    for capture in (False, True):
        torch.manual_seed(0)
        module = Residual()
        engine, *_ = spmdzero.initialize(
            model=module,
            optimizer=torch.optim.Rprop(module.parameters(), lr=0.01),
            config={
                "train_micro_batch_size_per_gpu": ROWS // runtime.device_count(),
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": None,
                "spmd": {"capture": capture, "min_shard_elements": 64},
            },
        )
        engines.append(engine)
    assert_twins_agree((engines[0], engines[1]), run)
    assert engines[1].capture.traced == 0


def test_train_batch_and_the_three_calls_start_the_same_program() -> None:
    engine = make_engine()
    # Of no other test's length, so that no program is there already.
    three_calls(engine, 5, length=6)
    before = counters.compiled()[0]
    train(engine, 3, length=6)
    assert counters.compiled()[0] == before
    assert (engine.capture.compared, engine.capture.ends.repeated) == (3, 7)


@pytest.mark.parametrize("way", WAYS)
def test_a_global_forward_that_draws_nothing_is_one_operation(way: str) -> None:
    engines = twins(lambda: Residual(dropout=0.0), spmd={"forward": "global"})
    assert_twins_agree(engines, lambda engine: WAYS[way](engine, 6))
    assert engines[1].capture.reason is None
    assert engines[1].capture.ends.repeated
