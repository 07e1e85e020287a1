"""Reading a value that is the same at each step is no reason to trace; reading any other is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import runtime
from tests.engine.captured import (
    LENGTH,
    ROWS,
    WAYS,
    WIDTH,
    Residual,
    assert_twins_agree,
    row,
    twins,
)

pytestmark = pytest.mark.backends("jax")

OUTSIDE: dict[str, torch.Tensor] = {}


def packed(x: torch.Tensor) -> torch.Tensor:
    """Where a sequence starts anew, as transformers' decoders look for it: nowhere."""
    positions = torch.arange(LENGTH, device=x.device).expand(x.shape[0], LENGTH)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


class ReadsPositions(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2 if (packed(x)[:, -1] == 0).all() else 3))


class ReadsUploaded(Residual):
    """Reads what it makes on the CPU and moves, as `nn.Transformer` reads its mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(LENGTH, LENGTH).triu(1).to(x.device)
        return super().forward(x * (2 if (mask == mask.triu(1)).all() else 3))


class UsesPositions(Residual):
    """torch_xla uploads the indices of the slices, which stay in the program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2 + packed(x)[:, -1].sum()))


@pytest.mark.parametrize(
    ("module", "way"),
    [
        row(ReadsPositions, "three calls"),
        row(ReadsPositions, "train_batch", slow=True),
        row(ReadsUploaded, "three calls"),
        (ReadsUploaded, "train_batch"),
        (UsesPositions, "train_batch"),
        row(UsesPositions, "three calls", slow=True),
    ],
)
def test_what_is_the_same_at_each_step_needs_no_trace(
    module: Callable[[], nn.Module], way: str
) -> None:
    run = WAYS[way]
    engines = twins(module)
    assert_twins_agree(engines, lambda engine: run(engine, 7))
    assert engines[1].capture.reason is None


@pytest.mark.slow
def test_a_decoder_of_transformers_needs_no_trace_without_its_cache() -> None:
    from tests.support.models import small_gpt2

    def run(engine: spmdzero.Engine) -> list[float]:
        ids = torch.randint(0, 128, (ROWS, 16), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        losses = [engine.train_batch(batch).item() for _ in range(4)]
        for _ in range(4):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engines = twins(small_gpt2)
    assert_twins_agree(engines, run)
    assert engines[1].capture.reason is None
    assert engines[1].capture.reason is None


class ReadsDraw(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2 if torch.rand(4, device=x.device).sum() > 9 else 3))


class ReadsBuffer(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2 if self.norm.running_mean.sum() > 9 else 3))


class ReadsOutside(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2 if OUTSIDE["tensor"].sum() > 9 else 3))


class UsesOutside(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * OUTSIDE["tensor"])


def there(ones: torch.Tensor) -> torch.Tensor:
    return ones


def pending(ones: torch.Tensor) -> torch.Tensor:
    """Of a buffer that nothing in Python holds any more."""
    return ones * 2


READS, USES = "reads a value", "neither an input nor part of the module"


@pytest.mark.parametrize(
    ("module", "outside", "reason", "way"),
    [
        row(ReadsBuffer, there, READS, "three calls"),
        (ReadsOutside, pending, READS, "train_batch"),
        row(UsesOutside, there, USES, "three calls"),
        *(
            row(*case, slow=True)
            for case in (
                *((ReadsDraw, there, READS, way) for way in WAYS),
                (ReadsBuffer, there, READS, "train_batch"),
                *((ReadsOutside, there, READS, way) for way in WAYS),
                (ReadsOutside, pending, READS, "three calls"),
                (UsesOutside, there, USES, "train_batch"),
                *((UsesOutside, pending, USES, way) for way in WAYS),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_may_be_another_at_the_next_step_is_traced(
    module: Callable[[], nn.Module],
    outside: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    way: str,
) -> None:
    run = WAYS[way]

    def rerun(engine: spmdzero.Engine) -> list[float]:
        losses: list[Any] = []
        for step in range(5):
            OUTSIDE["tensor"] = outside(torch.ones(WIDTH).to(runtime.device()))
            losses += run(engine, 1, first=step)
        return losses

    runtime.start()
    engines = twins(module)
    assert_twins_agree(engines, rerun)
    assert reason in str(engines[1].capture.reason)
