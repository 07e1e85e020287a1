"""A resumed run goes on with the batches, and the random numbers, that come next."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import spmdzero
from tests.checkpoint.runs import config, dataset, make_model, whole_state

ROWS = 80  # five micro-batches of 8 devices x 2


class Augmented(Dataset[Any]):
    """Reading a sample draws from all three generators."""

    def __init__(self) -> None:
        self._data = dataset(ROWS)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        x, y = self._data[index]
        return x + torch.randn(()) + random.random() + float(np.random.rand()), y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = dataset(ROWS)
        return (data[index] for index in range(ROWS))


def start(data: Any, workers: int = 0, **more: Any) -> spmdzero.Engine:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    engine, _, loader, _ = spmdzero.initialize(
        model=make_model(), training_data=data, config=config(2, **more)
    )
    if workers:
        loader = engine.deepspeed_io(data, num_local_io_workers=workers)
        engine.training_dataloader = loader
    return engine


def by_hand(engine: spmdzero.Engine, epochs: range, stop: int | None = None) -> list[float]:
    """Losses of whole epochs, in order, from wherever the loader stands."""
    losses: list[float] = []
    loader = engine.training_dataloader
    assert loader is not None
    for epoch in epochs:
        loader.set_epoch(epoch)
        for batch in loader:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if len(losses) == stop:
                return losses
    return losses


CASES = {
    "shuffled": (dataset(ROWS), 0),
    "shuffled, by two processes": (dataset(ROWS), 2),
    "random augmentation": (Augmented(), 0),
    "random augmentation, by two processes": (Augmented(), 2),
    "a stream": (Stream(), 0),
}


@pytest.mark.parametrize("stop", [3, 5, 7])
@pytest.mark.parametrize(("data", "workers"), CASES.values(), ids=CASES)
def test_the_rest_of_an_epoch_and_the_next_are_the_same(
    data: Any, workers: int, stop: int, tmp_path: Path
) -> None:
    engine = start(data, workers)
    undisturbed = by_hand(engine, range(3))
    stopped = start(data, workers)
    first = by_hand(stopped, range(3), stop=stop)
    assert first == undisturbed[:stop]
    stopped.save_checkpoint(tmp_path)
    resumed = start(data, workers)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    resumed.load_checkpoint(tmp_path)
    # As scripts do: the epoch that was stopped comes first. Stopped at its end, it has no more.
    rest = by_hand(resumed, range((stop - 1) // 5, 3))
    assert rest == undisturbed[stop:]


def test_train_batch_goes_on_with_its_own_data(tmp_path: Path) -> None:
    engine = start(Augmented(), gradient_accumulation_steps=2)
    for _ in range(5):  # ten micro-batches: the end of the second epoch
        engine.train_batch()
    engine.save_checkpoint(tmp_path)
    undisturbed = [engine.train_batch().item() for _ in range(4)]
    resumed = start(Augmented(), gradient_accumulation_steps=2)
    resumed.train_batch()
    resumed.load_checkpoint(tmp_path)
    assert [resumed.train_batch().item() for _ in range(4)] == undisturbed
    for name, tensor in whole_state(resumed).items():
        assert torch.equal(tensor, whole_state(engine)[name]), name


def test_another_size_of_micro_batch_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    engine = start(dataset(ROWS))
    by_hand(engine, range(1), stop=2)
    engine.save_checkpoint(tmp_path)
    other = start(dataset(ROWS), train_micro_batch_size_per_gpu=1)
    other.load_checkpoint(tmp_path)
    loader = other.training_dataloader
    assert loader is not None
    expected = start(dataset(ROWS), train_micro_batch_size_per_gpu=1).training_dataloader
    assert expected is not None
    whole = [batch[0].cpu() for batch in expected]
    rest = [batch[0].cpu() for batch in loader]
    assert len(whole) == 10
    assert len(rest) == 6
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[4:], strict=True))


def test_samples_that_are_seen_again_are_counted_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(dataset(ROWS), train_micro_batch_size_per_gpu=1)
    by_hand(engine, range(1), stop=3)
    engine.save_checkpoint(tmp_path)
    other = start(dataset(ROWS))
    other.load_checkpoint(tmp_path)
    assert "after 24 samples" in caplog.text
    assert "8 samples are seen again" in caplog.text


def test_the_manifest_tells_the_position(tmp_path: Path) -> None:
    engine = start(dataset(ROWS))
    by_hand(engine, range(1), stop=2)
    engine.save_checkpoint(tmp_path, tag="t")
    (file,) = (tmp_path / "t").glob("manifest-*.json")
    assert json.loads(file.read_text())["data_position"] == {
        "epoch": 0,
        "rows": 16,
        "handed_out": 2,
        "finished": False,
    }
