"""What the three calls follow, and what keeps them from being folded."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import spmdzero
from tests.engine.captured import (
    CHANGED_NUMBER,
    ROWS,
    Residual,
    assert_twins_agree,
    batches,
    make_engine,
    three_calls,
    train,
    twins,
)

pytestmark = pytest.mark.backends("jax")

OUTSIDE: dict[str, Any] = {}


def hook(engine: spmdzero.Engine) -> None:
    engine.module.blocks[0][1].register_forward_hook(lambda *_: None)


def drop_more(engine: spmdzero.Engine) -> None:
    engine.module.blocks[0][3].p = 0.5


def freeze(engine: spmdzero.Engine) -> None:
    engine.module.blocks[1].requires_grad_(False)


def evaluate(engine: spmdzero.Engine) -> None:
    engine.eval()


def more_micro_batches(engine: spmdzero.Engine) -> None:
    engine.set_train_batch_size(2 * ROWS)


@pytest.mark.parametrize(
    ("act", "folds"),
    [
        (hook, False),
        *(pytest.param(act, True, marks=pytest.mark.slow) for act in (drop_more, freeze, evaluate)),
        (more_micro_batches, True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_change_is_followed(act: Callable[[spmdzero.Engine], None], folds: bool) -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        first = three_calls(engine, 5)
        act(engine)
        return first + three_calls(engine, 5, first=5)

    engines = twins()
    assert_twins_agree(engines, run)
    assert (engines[1].capture.reason is None) == folds


def test_a_change_that_one_way_of_calling_notices_is_followed_by_the_other() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = three_calls(engine, 5) + train(engine, 4)
        drop_more(engine)
        # Whichever comes first after a change looks at the module.
        losses += train(engine, 1) + three_calls(engine, 4, first=9)
        engine.module.blocks[0][3].p = 0.25
        return losses + three_calls(engine, 1, first=13) + train(engine, 4)

    plain, known = twins()
    torch.manual_seed(2)
    losses = run(plain)
    torch.manual_seed(2)
    # Another rate of dropout changes each digit. JAX's program of `train_batch` rounds otherwise
    # than a traced step's on some processors.
    assert run(known) == pytest.approx(losses, rel=1e-5)
    assert known.capture.reason is None


class ByNumber(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OUTSIDE["calls"] = OUTSIDE.get("calls", 0) + 1
        return super().forward(x) * (2 + OUTSIDE["calls"])


class Keeping(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OUTSIDE["kept"] = x * 3
        try:
            return super().forward(x)
        finally:
            if OUTSIDE.pop("let go", True):
                OUTSIDE.pop("kept")


def test_a_number_that_changes_is_noticed() -> None:
    engine = make_engine(ByNumber())
    OUTSIDE["calls"] = 0
    three_calls(engine, 3)
    assert engine.capture.replayed + engine.capture.compared == 1
    assert re.search(CHANGED_NUMBER, str(engine.capture.reason))


class Outside(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.5 if OUTSIDE.get("now") else 1.5)


def test_check_finds_what_can_not_be_seen() -> None:
    engines = twins(Outside)

    def run(engine: spmdzero.Engine) -> list[float]:
        OUTSIDE["now"] = False
        losses = three_calls(engine, 5)
        OUTSIDE["now"] = True
        engine.capture.check()
        return losses + three_calls(engine, 5, first=5)

    assert_twins_agree(engines, run)
    assert (engines[1].capture.traced, engines[1].capture.reason) == (1, None)


def test_a_tensor_kept_outside_does_not_reach_the_devices() -> None:
    engine = make_engine(Keeping())
    OUTSIDE["let go"] = False
    (x,) = next(batches(1))
    loss = engine(x)
    assert engine.capture.traced == 1
    assert "keeps a tensor outside of the module" in str(engine.capture.reason)
    OUTSIDE.clear()
    engine.backward(loss)
    engine.step()
    assert three_calls(engine, 3)[-1] > 0


class Failing(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if OUTSIDE.get("fail"):
            raise ValueError("the user's own error")
        return y


def test_an_error_in_the_forward_is_the_users_and_leaves_nothing_behind() -> None:
    engine = make_engine(Failing())
    OUTSIDE["fail"] = True
    kept = []
    for (x,) in batches(2):
        with pytest.raises(ValueError, match="the user's own error") as error:
            engine(x)
        # As Jupyter keeps the latest error with all of its frames.
        kept.append(error.value)
    OUTSIDE.clear()
    assert three_calls(engine, 4)[-1] > 0
    assert engine.capture.reason is None


@pytest.fixture(autouse=True)
def nothing_outside() -> Iterator[None]:
    OUTSIDE.clear()
    yield
    OUTSIDE.clear()
