"""The model, the data and the comparison of the tests of captured steps."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import runtime
from spmdzero.engine._step_end import EVERY, AgreementRhythm

CHANGED_NUMBER = "a number in it is not the same"
ROWS, LENGTH, WIDTH = 16, 4, 16


class Residual(nn.Module):
    """Two residual blocks with dropout and a batch norm, whose buffers are state."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 32),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(32, WIDTH),
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.to(self.norm.weight.dtype).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            h = h + block(h)
        return F.mse_loss(h.float(), x.flip(-1))


def batches(count: int, length: int = LENGTH, first: int = 0) -> Iterator[tuple[torch.Tensor]]:
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index)
        yield (torch.randn(ROWS, length, WIDTH, generator=generator),)


def rows(index: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))


def between_checks(engine: spmdzero.Engine) -> spmdzero.Engine:
    """The same, which reads no agreement in its next 31 micro-batches."""
    engine._step_end.agreement = AgreementRhythm()
    for _ in range(EVERY // 2):
        engine._step_end.agreement.is_due()
    return engine


def make_engine(
    module: nn.Module | None = None,
    *,
    capture: bool = True,
    own: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **more: Any,
) -> spmdzero.Engine:
    """An engine of `module`, with AdamW or the optimizer that `own` makes."""
    torch.manual_seed(0)
    module = module or Residual()
    config = {
        "train_micro_batch_size_per_gpu": ROWS // runtime.device_count(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": None,
    } | more
    config["spmd"] = {"min_shard_elements": 64, "capture": capture} | more.get("spmd", {})
    optimizer = None
    if own is not None:
        optimizer = own(module.parameters())
        config = config | {"optimizer": None, "zero_allow_untested_optimizer": True}
    engine, *_ = spmdzero.initialize(model=module, optimizer=optimizer, config=config)
    torch.manual_seed(1)
    return engine


def train(engine: spmdzero.Engine, steps: int, **data: Any) -> list[float]:
    """The losses of so many steps; new data at each."""
    source = batches(steps * engine.gradient_accumulation_steps(), **data)
    return [loss.item() for loss in [engine.train_batch(source) for _ in range(steps)]]


def three_calls(engine: spmdzero.Engine, steps: int, **data: Any) -> list[float]:
    """As `train`, by forward, backward and step."""
    losses = []
    for (x,) in batches(steps * engine.gradient_accumulation_steps(), **data):
        output = engine(x)
        loss = output[0] if isinstance(output, tuple) else output
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


WAYS = {"train_batch": train, "three calls": three_calls}


def twins(
    module: Callable[[], nn.Module] = Residual, **more: Any
) -> tuple[spmdzero.Engine, spmdzero.Engine]:
    """An engine that traces and one that replays."""
    engines = []
    for capture in (False, True):
        torch.manual_seed(0)
        engines.append(make_engine(module(), capture=capture, **more))
    return engines[0], engines[1]


def captured(engine: spmdzero.Engine) -> spmdzero.Engine:
    """The engine after its first steps, of which the last was replayed."""
    for _ in range(6):
        train(engine, 1)
        if engine.capture.reason is None:
            return engine
    raise AssertionError(engine.capture)


def state(engine: spmdzero.Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in engine.named_tensors().items()}


def row(*case: Any, slow: bool = False) -> Any:
    """A row of a table of cases."""
    return pytest.param(*case, marks=[pytest.mark.slow] * slow)


def assert_same(mine: Any, its: Any) -> None:
    """To rounding.

    A step that is traced and one that is started again are compiled from two recordings. XLA fuses
    an operation with what else its program has, and on some processors the last bit of a sum is
    another. Adam's division carries it to the tenth step as 1e-6 of a weight.
    """
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6, equal_nan=True)


def assert_same_state(one: spmdzero.Engine, other: spmdzero.Engine) -> None:
    """The same step ran on the same numbers, see `assert_same`."""
    assert_same(state(one), state(other))
    counters = ("global_steps", "micro_steps", "global_samples", "skipped_steps", "cur_scale")
    for name in counters:
        assert getattr(one, name) == getattr(other, name), name
    assert one.get_lr() == other.get_lr()
    assert_same(one.get_global_grad_norm(), other.get_global_grad_norm())


def assert_twins_agree(
    engines: tuple[spmdzero.Engine, ...], run: Callable[[spmdzero.Engine], list[float]]
) -> None:
    """What `run` returns and the state that it leaves are the same, see `assert_same`."""
    losses = []
    for engine in engines:
        torch.manual_seed(2)
        random.seed(2)
        losses.append(run(engine))
    assert_same(losses[0], losses[1])
    assert_same_state(engines[0], engines[1])
