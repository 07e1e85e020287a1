"""The loader that initialize(training_data=...) returns."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, TensorDataset

import spmdzero
from tests.support.bounds import summed

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

DEVICES, MICRO = 8, 2


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(i)]) for i in range(self.count))


class Broken(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        raise OSError(f"row {index} is on a broken disk")


class Mean(nn.Module):
    """The mean of its input, weighted and perhaps dropped out."""

    def __init__(self, width: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(width)), dropout

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, self.dropout).mean()


def test_an_empty_dataset_is_named_as_what_has_no_rows() -> None:
    with pytest.raises(
        spmdzero.SpmdZeroUsageError, match=r"the dataset \(a TensorDataset\) has le"
    ):
        spmdzero.initialize(
            model=Mean(),
            training_data=TensorDataset(torch.empty(0, 4)),
            config={"train_micro_batch_size_per_gpu": MICRO},
        )


def test_a_loader_without_batches_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, loader = make(rows(40), dataloader_drop_last=True)
    assert len(loader) == 2
    assert "no batches" not in caplog.text
    assert len(engine.deepspeed_io(rows(8), route="eval")) == 0
    assert (
        "the loader has no batches: 8 rows are less than one batch of 16, and "
        '"dataloader_drop_last" is true' in caplog.text
    )


def make(
    data: Dataset[Any], model: nn.Module | None = None, collate: Any = None, **more: Any
) -> tuple[spmdzero.Engine, Any]:
    settings = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine, _, loader, _ = spmdzero.initialize(
        model=model or Mean(), training_data=data, collate_fn=collate, config=settings | more
    )
    return engine, loader


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count).float().reshape(-1, 1), torch.arange(count))


def test_each_device_gets_the_rows_of_its_deepspeed_rank() -> None:
    data = rows(70)
    _, loader = make(data)
    ranks = [list(DistributedSampler(data, num_replicas=DEVICES, rank=r)) for r in range(DEVICES)]
    seen: list[list[int]] = [[] for _ in range(DEVICES)]
    for x, y in loader:
        shards = zip(spmdzero.local_shards(x), spmdzero.local_shards(y), strict=True)
        for rank, (inputs, numbers) in enumerate(shards):
            # Born as shards: a device has its own rows only.
            assert inputs.flatten().tolist() == numbers.tolist()
            seen[rank] += numbers.tolist()
    assert seen == ranks


def test_a_short_last_micro_batch_trains_or_is_dropped() -> None:
    engine, loader = make(rows(24))
    shapes = []
    for batch in loader:
        shapes.append(batch[0].shape[0])
        engine.backward(engine(*batch))
        engine.step()
    assert shapes == [16, 8] == [16, 24 - 16]
    assert len(loader) == 2
    # The loader answers for its own short micro-batch; the same rows from the user are a mistake
    # before there was a whole one.
    engine, loader = make(rows(8))
    for batch in loader:
        engine(*batch)
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="8 rows"):
        engine(torch.zeros(8, 1))
    _, dropping = make(rows(24), dataloader_drop_last=True)
    assert [batch[0].shape[0] for batch in dropping] == [16]
    assert len(dropping) == 1


def test_an_iterable_dataset_is_read_in_order_and_its_odd_end_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, loader = make(Numbers(37))
    with caplog.at_level("WARNING", logger="spmdzero"):
        found = [batch.cpu().flatten().tolist() for batch in loader]
    assert [value for part in found for value in part] == [float(i) for i in range(32)]
    assert [r.message for r in caplog.records if "dropped the last 5 rows" in r.message]


def test_train_batch_uses_the_loader_over_and_over_in_new_orders() -> None:
    engine, loader = make(rows(32))
    orders = []
    data = loader.endless()
    for _ in range(2):
        orders.append([next(data)[1].cpu().tolist() for _ in range(2)])
    assert sorted(chain(*orders[0])) == sorted(chain(*orders[1])) == list(range(32))
    assert orders[0] != orders[1]
    losses = [engine.train_batch().item() for _ in range(2)]
    assert sum(losses) / 2 == summed(sum(range(32)) / 32)


def test_an_error_of_the_dataset_reaches_the_training_loop() -> None:
    _, loader = make(Broken())
    with pytest.raises(OSError, match="broken disk"):
        next(iter(loader))


def test_a_collate_function_and_nested_batches() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        x = torch.stack([sample[0] for sample in samples])
        return {"x": x, "extra": {"table": torch.arange(3), "name": "numbers"}}

    _, loader = make(rows(16), collate=collate)
    (batch,) = list(loader)
    assert {tuple(s.shape) for s in spmdzero.local_shards(batch["x"])} == {(MICRO, 1)}
    assert {tuple(s.shape) for s in spmdzero.local_shards(batch["extra"]["table"])} == {(3,)}
    assert batch["extra"]["name"] == "numbers"


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2000)[:1] + index


def test_a_dataset_that_draws_random_numbers_does_not_disturb_the_dropout_masks() -> None:
    def losses() -> list[float]:
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine, loader = make(Noisy(), Mean(64, dropout=0.5), optimizer=sgd)
        torch.manual_seed(3)
        found = []
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    first = losses()
    assert first == losses() == losses()


def test_rows_are_the_samples_even_when_a_batch_starts_with_something_else() -> None:
    def samples_of(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample[0] for sample in samples])

    _, loader = make(rows(32), collate=lambda samples: (torch.ones(5, 5), samples_of(samples)))
    assert [batch[1].shape[0] for batch in loader] == [16, 16]
    _, loader = make(rows(32), collate=lambda samples: samples_of(samples)[:13])
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="13 rows"):
        list(loader)
