"""Labels and other indices: on the CPU beside an engine's outputs, and outside of their range."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import current
from tests.support.engines import Mean, one_call, replays, start, three_calls

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")


@pytest.mark.parametrize("shape", [(), (3,)], ids=["of rows", "of rows' places"])
def test_a_loss_outside_of_the_model_takes_labels_from_the_cpu(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Conv1d(4, 5, 1) if shape else nn.Linear(4, 5)
    plain = copy.deepcopy(model)
    engine = start(model, gradient_clipping=0.0)
    rows = engine.dp_world_size
    x, labels = torch.randn(rows, 4, *shape), torch.randint(0, 5, (rows, *shape))
    loss = F.cross_entropy(engine(x), labels)
    engine.backward(loss)
    expected = F.cross_entropy(plain(x), labels)
    # A mean of 8 or 24 fp32 numbers.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    engine.step()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    expected.backward()
    optimizer.step()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


class Indexing(nn.Module):
    """Looks indices up by `use`, which takes a `[rows, 5]` table of the model's and `[rows]`."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.line, self.use = nn.Linear(4, 5), use
        self.table = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        used = self.use(self.line(x) + self.table.sum(), index)
        return used.float().nan_to_num().mean()


def _put(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, index] = 1.0
    return x


# What torch calls negative it counts from the end in the last of these.
USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x.T, padding_idx=4),
    "cross_entropy": F.cross_entropy,
    "label_smoothing": lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
    "cross_entropy of places": lambda x, i: F.cross_entropy(x[..., None], i[:, None]),
    "gather": lambda x, i: x.gather(1, i[:, None]),
    "index_select": lambda x, i: x.index_select(1, i),
    "scatter": lambda x, i: x.scatter(1, i[:, None], 2.0),
    "scatter_add": lambda x, i: x.scatter_add(1, i[:, None], x[:, :1]),
    "index_add": lambda x, i: x.index_add(1, i, x[:, : len(i)]),
    "[...]": lambda x, i: x[:, i],
    "[...] =": _put,
}


@pytest.mark.parametrize("use", USES)
def test_an_index_past_the_end_is_said_with_its_line(use: str) -> None:
    torch.manual_seed(0)
    engine = start(Indexing(USES[use]), train_micro_batch_size_per_gpu=2)
    rows = 2 * engine.dp_world_size
    x, good = torch.randn(rows, 4), torch.arange(rows) % 5
    three_calls(engine, (x, good))
    bad = good.clone()
    # One of the last device's, so that no device's flag may be left out.
    bad[-1] = 5
    with pytest.raises(spmdzero.OutOfRangeError, match=r"is 5, outside of -?\d to 4\.") as caught:
        three_calls(engine, (x, bad))
    assert f"{__file__}:" in str(caught.value)
    # It is said once, and training goes on.
    three_calls(engine, *[(x, good)] * 2)
    assert engine.global_steps == 4


@pytest.mark.parametrize("use", ["cross_entropy", "embedding", "[...]"])
def test_ignore_index_padding_and_what_counts_from_the_end_are_legal(use: str) -> None:
    torch.manual_seed(0)
    engine = start(Indexing(USES[use]), train_micro_batch_size_per_gpu=2)
    rows = 2 * engine.dp_world_size
    index = torch.arange(rows) % 5
    index[::2] = {"cross_entropy": -100, "embedding": 4, "[...]": -5}[use]
    three_calls(engine, *[(torch.randn(rows, 4), index)] * 4)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(three_calls, id="folded", marks=pytest.mark.backends("jax")),
        pytest.param(one_call, id="captured"),
    ],
)
def test_a_step_that_is_no_longer_traced_finds_an_index_past_the_end(run: Any) -> None:
    torch.manual_seed(0)
    engine = start(Indexing(F.cross_entropy))
    x, good = torch.randn(engine.dp_world_size, 4), torch.arange(engine.dp_world_size) % 5
    for _ in range(5):
        run(engine, (x, good))
    run(engine, (x, good + 1))
    run(engine, (x, good))
    assert replays(engine)
    with pytest.raises(spmdzero.OutOfRangeError, match="label of the loss is 5, outside of 0 to 4"):
        run(engine, (x, good))


@pytest.mark.skipif(current().name != "jax", reason="torch_xla doesn't list what is pending")
def test_a_label_of_a_loss_outside_of_the_model_that_is_no_class_is_said() -> None:
    torch.manual_seed(0)
    engine = start(nn.Linear(4, 5))
    x, good = torch.randn(engine.dp_world_size, 4), torch.arange(engine.dp_world_size) % 5

    def train(labels: torch.Tensor) -> None:
        engine.backward(F.cross_entropy(engine(x), labels))
        engine.step()

    for labels in (good, good, good, good, good, torch.where(good == 1, -100, good), good + 1):
        train(labels)
    with pytest.raises(spmdzero.OutOfRangeError, match=r"label of the loss is 5.* since step 6"):
        train(good)


def test_a_loss_that_is_not_finite_is_said_though_no_step_prints(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(Mean(), steps_per_print=1000)
    rows = torch.ones(engine.dp_world_size, 4)
    with caplog.at_level(logging.WARNING, logger="spmdzero"):
        three_calls(engine, rows, rows / 0)
    (said,) = [r.message for r in caplog.records if "not finite" in r.message]
    assert "at step 1, and the devices found no index out of range" in said
