"""Steps that are traced each time: Python that can't be replayed, and somebody who looks."""

import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import spmdzero
from spmdzero.backend import runtime
from tests.engine.captured import (
    CHANGED_NUMBER,
    LENGTH,
    ROWS,
    WAYS,
    WIDTH,
    Residual,
    assert_twins_agree,
    captured,
    make_engine,
    row,
    train,
    twins,
)

pytestmark = pytest.mark.backends("jax")

OUTSIDE: dict[str, Any] = {}


class Reads(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if bool((x.detach() * 0).sum() == 0) else 2)


class Counts(Residual):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class DrawsInPython(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + round(random.random()))


class DrawsOnTheHost(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + round(torch.rand(()).item()))


class ScalesByGlobal(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OUTSIDE["scale"] += 0.125
        return super().forward(x) * OUTSIDE["scale"]


class BranchesByGlobal(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OUTSIDE["calls"] += 1
        loss = super().forward(x)
        return loss.sqrt() if OUTSIDE["calls"] % 2 else loss


class OnTheHost(Residual):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), torch.tensor(x.shape[0])


class Foreign(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * OUTSIDE["tensor"].mean()


class KeepsTensorOutside(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * OUTSIDE["tensor"]


@pytest.mark.parametrize(
    ("way", "module", "said"),
    [
        ("train_batch", Reads, "reads a value .* at .*test_captured_traced.py:"),
        row("three calls", Counts, "the forward changes the module: 'calls' of"),
        *(
            row(*case, slow=True)
            for case in (
                ("three calls", Reads, "reads a value .* at .*test_captured_traced.py:"),
                ("train_batch", Counts, "the forward changes the module: 'calls' of"),
                ("three calls", DrawsInPython, "Python's or numpy's random numbers"),
                ("train_batch", DrawsInPython, "Python's or numpy's random numbers"),
                ("three calls", DrawsOnTheHost, "draws from torch's CPU generator in Python"),
                ("train_batch", DrawsOnTheHost, "draws from torch's CPU generator in Python"),
                ("train_batch", ScalesByGlobal, CHANGED_NUMBER),
                ("train_batch", BranchesByGlobal, "Python code in the model took another way"),
            )
        ),
        row("three calls", Foreign, "neither an input nor part of the module"),
        row("three calls", OnTheHost, "returns a tensor on the CPU"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_python_that_matters_is_traced_at_each_step_with_the_reason(
    way: str, module: type[nn.Module], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    train_so_many = WAYS[way]

    def run(engine: spmdzero.Engine) -> list[float]:
        OUTSIDE.update(scale=1.0, calls=0)
        return train_so_many(engine, 7)

    runtime.start()
    OUTSIDE["tensor"] = torch.ones(3, 5).to(runtime.device())
    engines = twins(module)
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert_twins_agree(engines, run)
    assert re.search(said, str(engines[1].capture.reason))
    assert engines[1].capture.replayed == 0
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "runs the model's Python at every step from now on" in warning
    assert re.search(said, warning)


@pytest.mark.parametrize("way", [row("train_batch", slow=True), row("three calls")])
def test_errors_of_the_users_own_are_no_reason_to_go_on_tracing(way: str) -> None:
    class Fails(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if OUTSIDE["fails"]:
                raise RuntimeError("not yet")
            return super().forward(x)

    train_so_many = WAYS[way]
    OUTSIDE["fails"], engine = True, make_engine(Fails())
    for _ in range(5):
        with pytest.raises(RuntimeError, match="not yet"):
            train_so_many(engine, 1)
    OUTSIDE["fails"] = False
    train_so_many(engine, 6)
    assert engine.capture.reason is None


def test_a_tensor_outside_of_the_module_is_not_taken_for_a_constant() -> None:
    engine = make_engine(KeepsTensorOutside(dropout=0.0), spmd={"forward": "global"})
    OUTSIDE["tensor"] = engine.mesh.place(torch.full((1,), 2.0)).sum()
    train(engine, 5)
    assert engine.capture.replayed == 0
    assert "neither an input nor part of the module" in str(engine.capture.reason)


def test_an_input_that_is_also_part_of_the_state_is_read_before_it_is_written() -> None:
    class Offset(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.ones(ROWS, LENGTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.offset)

    def run(engine: spmdzero.Engine) -> list[float]:
        given = [iter([(engine.module.offset,)]) for _ in range(5)]
        return [engine.train_batch(batch).item() for batch in given]

    assert_twins_agree(twins(Offset, spmd={"forward": "global"}), run)


def test_a_global_that_changes_later_is_found_by_check(caplog: pytest.LogCaptureFixture) -> None:
    class ScaledOnDemand(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * OUTSIDE["factor"]

    OUTSIDE["factor"] = 1.5
    engine = captured(make_engine(ScaledOnDemand()))
    engine.capture.check()
    train(engine, 1)
    assert "seen 2 of 3 times" in str(engine.capture.reason)
    train(engine, 1)
    assert engine.capture.reason is None
    OUTSIDE["factor"] = 3.0
    engine.retrace()
    train(engine, 1)
    assert re.search(CHANGED_NUMBER, str(engine.capture.reason))
    captured(engine)


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def ignore(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (lambda _: Operations(), "a torch dispatch or function mode watches"),
        (lambda _: Calls(), "a torch dispatch or function mode watches"),
        (
            lambda _: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            "autograd is watched",
        ),
        pytest.param(
            lambda _: torch.autograd.set_detect_anomaly(True),
            "autograd is watched",
            marks=pytest.mark.slow,
        ),
        (lambda engine: hooked(engine.register_forward_hook(ignore)), "a hook of the engine"),
        (
            lambda _: hooked(nn.modules.module.register_module_forward_hook(ignore)),
            "a hook of the engine, or of all modules",
        ),
        (
            lambda engine: hooked(engine.optimizer.register_step_post_hook(ignore)),
            "a hook of the optimizer",
        ),
    ],
    ids=[
        *("dispatch mode", "function mode", "saved tensors", "anomaly"),
        *("engine hook", "global hook", "optimizer hook"),
    ],
)
def test_who_looks_at_a_step_has_it_traced_and_is_named_once(
    look: Callable[[spmdzero.Engine], contextlib.AbstractContextManager[Any]],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = captured(make_engine())
    with caplog.at_level(logging.INFO, "spmdzero"), look(engine):
        train(engine, 2)
        assert said in str(engine.capture.reason)
    assert caplog.text.count("train_batch runs the model's Python in this step") == 1
    train(engine, 1)
    assert engine.capture.reason is None


def test_wall_clock_breakdown_times_traced_steps() -> None:
    engine = make_engine(wall_clock_breakdown=True)
    train(engine, 5)
    assert "wall_clock_breakdown" in str(engine.capture.reason)
    assert engine.get_wall_clock_timers()["fwd"] > 0
