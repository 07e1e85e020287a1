"""The audit finds losses that are sums, and so depend on the number of devices; and only those."""

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.integrations import ClientEngine
from tests.audit.models import WIDTH, config, engine_of
from tests.support.bounds import assert_summed, summed

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS = 16


class Losses(nn.Module):
    """`[rows, WIDTH]` and a number -> a loss of each kind; has a batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(
        self, x: torch.Tensor, keep: torch.Tensor, count: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        y = F.dropout(self.norm(self.body(x)), 0.1, self.training)
        squares = y.square().mean(1)
        near = y @ x.T
        return {
            "loss": squares.mean(),
            # The rows of some devices are kept, of others dropped but for one.
            "masked": (squares * keep).sum() / keep.sum(),
            "tiny": squares.mean() * 1e-30,
            "zero": squares.sum() * 0.0,
            "contrastive": F.cross_entropy(near * 0.01, torch.arange(len(y), device=y.device)),
            "norm": squares.norm(),
            "sum": squares.sum(),
            "sum over a given number": squares.sum() / count,
            "sum and a mean": squares.sum() * 0.5 + squares.mean(),
            "declared": squares.sum(),
            "not differentiated": squares.detach().sum(),
        }


class Sum(nn.Module):
    """Returns the sum itself, as the official examples of variational autoencoders do."""

    def __init__(self, rows: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.rows = nn.Linear(WIDTH, WIDTH), rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.rows is None else x.reshape(self.rows, WIDTH)
        return self.body(x).square().sum() / 100


def cfg(**more: Any) -> dict[str, Any]:
    return config(**more) | {"train_micro_batch_size_per_gpu": ROWS // 8}


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def test_sums_are_found_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(Losses(), cfg(spmd={"outputs": {"declared": "sum"}}))
    inputs = batch(), (torch.arange(ROWS) % 5 != 0).float(), torch.tensor(16.0)
    caplog.clear()
    with spmdzero.auditing(engine) as audit, caplog.at_level(logging.WARNING):
        engine.train_batch(iter([inputs]))
        drawn = torch.get_rng_state()
        buffers = {name: buffer.cpu() for name, buffer in engine.module.named_buffers()}
        reads = engine.programs.script_reads
    assert [f.subject for f in audit.report.of("loss-scale")] == [
        "output 'sum' of the model",
        "output 'sum over a given number' of the model",
        "output 'sum and a mean' of the model",
    ]
    found, *_ = audit.report.of("loss-scale")
    assert "8 devices make 1/8" in found.cause
    assert '"outputs": {"sum": "sum"}' in found.fix
    # The forwards that were looked at left no trace.
    assert torch.equal(torch.get_rng_state(), drawn)
    assert engine.programs.script_reads == reads
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer.cpu(), buffers[name])
    assert caplog.text == ""


def test_what_the_finding_says_of_one_device_and_of_the_fix_is_so() -> None:
    one_device = Sum()(batch()).item()
    engine = engine_of(Sum(), cfg())
    report = spmdzero.audit(engine, [batch()])
    (finding,) = report.of("loss-scale")
    assert finding.subject == "the loss that the model returns"
    assert "twice it is 2 times as large, with each three times 3 times" in finding.evidence
    assert engine_of(Sum(), cfg())(batch()).item() == summed(one_device / 8)
    assert '"outputs": {"": "sum"}' in finding.fix
    engine = engine_of(Sum(), cfg(spmd={"outputs": {"": "sum"}}))
    assert engine.train_batch(iter([batch()])).item() == summed(one_device)


class OverItems(Sum):
    """Divides as transformers' models do, by what is handed in."""

    def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / num_items_in_batch


@pytest.mark.parametrize("kind", [spmdzero.Engine, ClientEngine])
def test_num_items_in_batch_is_divided_for_a_client_alone(kind: type[spmdzero.Engine]) -> None:
    engine, *_ = spmdzero.initialize(model=OverItems(), config=cfg(), engine_class=kind)
    inputs = {"x": batch(), "num_items_in_batch": torch.tensor(float(ROWS))}
    report = spmdzero.audit(engine, [inputs])
    assert bool(report.of("loss-scale")) == (kind is spmdzero.Engine)


def test_a_forward_that_takes_no_more_rows_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report = spmdzero.audit(engine_of(Sum(rows=2), cfg()), [batch()])
    assert report.of("loss-scale") == ()
    assert "can't tell whether the loss depends on the number of devices" in caplog.text
    assert re.search(r"raised \w+Error: .*shape '\[2, 64\]' is invalid", caplog.text)


class Rows(nn.Module):
    """Returns what a script computes its loss of: `[rows, WIDTH]`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


SUMS: dict[str, Any] = {
    "sum": lambda y: y.square().sum(),
    "sum of sums": lambda y: y.square().sum(-1).sum(),
    "sum of means": lambda y: y.square().mean(-1).sum(),
    "mean of sums over rows": lambda y: y.square().sum(0).mean(),
    "reduction": lambda y: F.mse_loss(y, torch.zeros_like(y), reduction="sum"),
    "cross-entropy": lambda y: F.cross_entropy(
        y, torch.arange(len(y), device=y.device), reduction="sum"
    ),
    "and a mean": lambda y: y.square().sum() + y.mean(),
}
NO_SUMS: dict[str, Any] = {
    "mean": lambda y: y.square().mean(),
    "mean of sums": lambda y: y.square().sum(-1).mean(),
    "sum of means over rows": lambda y: y.square().mean(0).sum(),
    "reduction": lambda y: F.mse_loss(y, torch.zeros_like(y)),
    "cross-entropy": lambda y: F.cross_entropy(y, torch.arange(len(y), device=y.device)),
    "divided": lambda y: y.square().sum() / y.numel(),
    "masked": lambda y: (y * (y > 0)).sum() / (y > 0).sum(),
    "one row": lambda y: y[0].square().sum(),
    "norm": lambda y: y.norm(),
}


@pytest.fixture(scope="module")
def rows() -> spmdzero.Engine:
    return engine_of(Rows(), cfg())


def findings_of(engine: spmdzero.Engine, loss: Any) -> tuple[Any, ...]:
    with spmdzero.auditing(engine) as audit:
        engine.backward(loss(engine(batch())))
        engine.step()
    return audit.report.of("loss-scale")


@pytest.mark.parametrize("name", [n if n in ("sum", "and a mean") else pytest.param(
    n, marks=pytest.mark.slow) for n in SUMS])  # fmt: skip
def test_a_sum_over_rows_outside_of_the_model_is_found_at_its_first_step(
    rows: spmdzero.Engine, name: str
) -> None:
    (finding,) = findings_of(rows, SUMS[name])
    assert finding.subject == "the loss that engine.backward was given"
    assert "its gradient is 8 times DeepSpeed's" in finding.cause
    assert "engine.backward(loss / engine.dp_world_size)" in finding.fix


@pytest.mark.parametrize("name", [n if n == "divided" else pytest.param(
    n, marks=pytest.mark.slow) for n in NO_SUMS])  # fmt: skip
def test_what_is_no_sum_over_rows_is_not(rows: spmdzero.Engine, name: str) -> None:
    assert findings_of(rows, NO_SUMS[name]) == ()


@pytest.mark.slow
def test_what_the_finding_says_of_deepspeeds_number_is_so() -> None:
    """DeepSpeed's gradient is the mean over ranks of each rank's own."""
    plain, engine = Rows(), engine_of(Rows(), cfg())
    for part in batch().chunk(8):
        (plain(part).square().sum() / 8).backward()
    engine.backward(engine(batch()).square().sum() / engine.dp_world_size)
    assert_summed(engine.module.body.weight.grad.cpu(), plain.body.weight.grad)
