"""A micro-batch with fewer rows, as the last one of a user's own DataLoader."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spmdzero
from spmdzero import SpmdZeroUsageError, replicated
from tests.support.bounds import assert_summed
from tests.support.engines import replays

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

DEVICES, MICRO = 8, 4
WHOLE = DEVICES * MICRO
EPOCH = (WHOLE, WHOLE, WHOLE // 2)


class LogOfMean(nn.Module):
    """Its loss over all rows is not the mean of its losses over the devices' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x).squeeze(-1) - y).square().mean().log1p()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * table.sum()).mean()


def make(model: nn.Module | None = None, **more: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "spmd": {"min_shard_elements": 16},
    }
    return spmdzero.initialize(model=model or LogOfMean(), config=settings | more)[0]


def loader() -> DataLoader[Any]:
    x = torch.randn(sum(EPOCH), 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=WHOLE)


def epochs(count: int) -> Iterator[Any]:
    data = loader()
    return itertools.chain.from_iterable(data for _ in range(count))


def by_ranks(model: nn.Module, batches: Iterator[Any], accumulation: int) -> list[float]:
    """Trains as DeepSpeed's ranks do: each the mean over its own rows, then the mean of those."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01)
    losses = []
    for number, (x, y) in enumerate(batches, start=1):
        ranks = zip(x.chunk(DEVICES), y.chunk(DEVICES), strict=True)
        loss = torch.stack([model(*rows) for rows in ranks]).mean()
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def copied(engine: spmdzero.Engine) -> nn.Module:
    model = LogOfMean()
    model.load_state_dict({name: value.cpu() for name, value in engine.module.state_dict().items()})
    return model


def same_weights(engine: spmdzero.Engine, model: nn.Module) -> None:
    assert_summed(copied(engine).state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [(1, 2), (2, 1), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((0, 1), (2, 2)))],
)
def test_a_dataloader_with_a_short_last_batch_trains_as_deepspeeds_ranks(
    stage: int, accumulation: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(gradient_accumulation_steps=accumulation, zero_optimization={"stage": stage})
    model = copied(engine)
    losses = []
    for batch in epochs(4):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == pytest.approx(by_ranks(model, epochs(4), accumulation), rel=1e-5)
    same_weights(engine, model)
    assert engine.global_samples == 12 // accumulation * engine.train_batch_size()
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line for line in said if "rows instead of" in line] == [
        "a micro-batch of 16 rows instead of 32: each of 8 devices trains on 2, in a program of "
        "its own. DataLoader(drop_last=True) leaves the last short batch of an epoch out"
    ]


def test_train_batch_replays_short_batches_too() -> None:
    engine = make(gradient_accumulation_steps=3)
    model = copied(engine)
    data = epochs(8)
    losses = [engine.train_batch(data).item() for _ in range(8)]
    means = torch.tensor(by_ranks(model, epochs(8), 3)).reshape(8, 3).mean(1)
    assert losses == pytest.approx(means.tolist(), rel=1e-5)
    same_weights(engine, model)
    assert replays(engine)


def test_train_batch_of_one_short_batch_trains_when_it_is_the_whole_step() -> None:
    engine = make()
    model = copied(engine)
    losses = [engine.train_batch(tuple(batch)).item() for batch in loader()]
    assert losses == pytest.approx(by_ranks(model, iter(loader()), 1), rel=1e-5)


def test_rows_for_one_device_instead_of_all_never_train() -> None:
    engine = make()
    x = torch.zeros(sum(EPOCH), 6)
    for rows in (DEVICES, WHOLE // 2):
        for batch in DataLoader(TensorDataset(x, x[:, 0]), batch_size=rows):
            with pytest.raises(SpmdZeroUsageError, match="trains after the first whole one"):
                engine(*batch)
    engine(x[:WHOLE], x[:WHOLE, 0])
    engine(x[:DEVICES], x[:DEVICES, 0])
    engine.set_train_micro_batch_size(2 * MICRO)
    with pytest.raises(SpmdZeroUsageError, match=rf"has {WHOLE} rows, a micro-batch has 64"):
        engine(x[:WHOLE], x[:WHOLE, 0])


def test_rows_that_devices_cannot_share_say_what_to_do() -> None:
    engine = make()
    x = torch.zeros(40, 6)
    engine(x[:WHOLE], x[:WHOLE, 0])
    for rows, match in {
        12: r"12 rows, which 8 .*drop_last=True.*pad it to 16 rows",
        0: "has 0 rows, a micro-batch has 32",
        40: "has 40 rows, a micro-batch has 32",
    }.items():
        with pytest.raises(SpmdZeroUsageError, match=match):
            engine(x[:rows], x[:rows, 0])


class Judged(LogOfMean):
    """What a validation wants: loss, one value for each row, two counts of rows, all in one."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = self.body(x).squeeze(-1)
        right = (found.sign() == y.sign()).sum()
        return {
            "loss": (found - y).square().mean(),
            "found": found,
            "right": right,
            "each": right,
        }


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_evaluation_takes_every_row(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    outputs = {"right": "sum", "each": "stack"}
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    spmd = {"min_shard_elements": 16, "outputs": outputs}
    engine = make(Judged(), zero_optimization=section, spmd=spmd)
    model = Judged()
    model.load_state_dict(copied(engine).state_dict())
    x = torch.randn(119, 6, generator=torch.Generator().manual_seed(2))
    y, seen = x.sum(1).sin(), []
    total = rows = 0.0
    engine.eval()
    with torch.no_grad(), caplog.at_level("INFO", logger="spmdzero"):
        for batch in DataLoader(TensorDataset(x, y), batch_size=2 * WHOLE):
            out = engine(*batch)
            assert out["right"].item() == out["each"].sum().item()
            total += out["loss"].item() * len(batch[0])
            rows += out["right"].item()
            seen.append(out["found"].cpu())
        expected = model(x, y)
        # Fewer rows than devices, and one.
        for few in (3, 1):
            assert_summed(
                {"found": engine(x[:few], y[:few])["found"].cpu()},
                {"found": expected["found"][:few]},
            )
    assert_summed({"found": torch.cat(seen)}, {"found": expected["found"]})
    assert total / len(x) == pytest.approx(expected["loss"].item(), rel=1e-6)
    assert rows == expected["right"].item()
    said = [r.getMessage() for r in caplog.records if "an evaluation of" in r.getMessage()]
    assert said == [
        "an evaluation of 55 rows, which 8 devices can't share equally: each computes all of "
        "them, which is exact and as slow as one. A multiple of 8 is shared"
    ]


def table_mean(engine: spmdzero.Engine, table: torch.Tensor, x: torch.Tensor) -> float:
    return (copy.deepcopy(engine.module.linear).cpu()(x) * table.sum()).mean().item()


def test_only_what_was_a_batch_before_is_one_when_it_is_short() -> None:
    engine = make(Table())
    x, table = torch.rand(WHOLE, 6), torch.rand(WHOLE // 2, 3)
    for training, rows in ((True, WHOLE), (True, WHOLE // 2), (False, WHOLE // 2)):
        engine.train(training)
        expected = table_mean(engine, table, x[:rows])
        assert engine(table, x[:rows]).item() == pytest.approx(expected, rel=1e-5)


def test_an_input_that_only_looked_like_a_batch_is_refused_when_it_no_longer_does() -> None:
    engine = make(Table())
    x, table = torch.rand(WHOLE, 6), torch.rand(WHOLE, 3)
    engine(table, x)
    for bad in ((table, x[:16]), (table[:16], x), (table[:8], x[:16])):
        with pytest.raises(SpmdZeroUsageError, match=r"both were batches.*spmdzero.replicated"):
            engine(*bad)
    engine = make(Table())
    for rows in (WHOLE, WHOLE // 2):
        found = engine(replicated(table), x[:rows]).item()
        assert found == pytest.approx(table_mean(engine, table, x[:rows]), rel=1e-5)
