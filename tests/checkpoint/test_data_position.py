"""A resumed run goes on with the batches, and the random numbers, that come next."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import spmdzero
from tests.checkpoint.runs import assert_state, config, dataset, make_model, whole_state

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


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def start(data: Any, workers: int = 0, **more: Any) -> spmdzero.Engine:
    seed_all(3)
    engine, _, loader, _ = spmdzero.initialize(
        model=make_model(), training_data=data, config=config(2, **more)
    )
    if workers:
        loader = engine.deepspeed_io(data, num_local_io_workers=workers)
        engine.training_dataloader = loader
    return engine


def by_hand(
    engine: spmdzero.Engine,
    epochs: range,
    stop: int | None = None,
    after: Callable[[int], None] = lambda done: None,
) -> list[float]:
    """Losses of whole epochs, in order, from wherever the loader stands.

    Args:
        engine: what trains.
        epochs: their numbers.
        stop: leave the loop after so many micro-batches.
        after: called after each one with how many there were.
    """
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
            after(len(losses))
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


# Workers that draw at random need all that those which don't need.
SLOW = {"shuffled", "shuffled, by two processes", "random augmentation"}


@pytest.mark.parametrize(
    ("data", "workers"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, case in CASES.items()
    ],
)
def test_the_rest_of_an_epoch_and_the_next_are_the_same(
    data: Any, workers: int, tmp_path: Path
) -> None:
    stops = (3, 5, 7)
    engine = start(data, workers)

    def save(done: int) -> None:
        if done in stops:
            engine.save_checkpoint(tmp_path, tag=str(done))

    undisturbed = by_hand(engine, range(3), after=save)
    stopped = start(data, workers)
    assert by_hand(stopped, range(3), stop=7) == undisturbed[:7]
    stopped.save_checkpoint(tmp_path, tag="left")
    resumed = start(data, workers)
    for stop, tag in [*((stop, str(stop)) for stop in stops), (7, "left")]:
        seed_all(99)
        resumed.load_checkpoint(tmp_path, tag=tag)
        # As scripts do: the epoch that was stopped comes first. At its end, it has no more.
        assert by_hand(resumed, range((stop - 1) // 5, 3)) == undisturbed[stop:]


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
    assert_state(resumed, whole_state(engine))


def test_the_manifest_tells_the_position(tmp_path: Path) -> None:
    engine = start(dataset(ROWS))
    by_hand(engine, range(1), stop=2)
    engine.save_checkpoint(tmp_path, tag="t")
    (file,) = (tmp_path / "t").glob("manifest-*.json")
    expected = {"epoch": 0, "rows": 16, "handed_out": 2, "finished": False}
    assert json.loads(file.read_text())["data_position"] == expected


def test_the_epoch_after_a_finished_one_trains_in_a_resumed_run(tmp_path: Path) -> None:
    engine = start(Augmented())
    by_hand(engine, range(1))
    engine.save_checkpoint(tmp_path)
    undisturbed = by_hand(engine, range(1, 2))
    resumed = start(Augmented())
    resumed.load_checkpoint(tmp_path)
    assert by_hand(resumed, range(1, 2)) == undisturbed


@pytest.mark.parametrize("captured", [True, False], ids=["train_batch", "loop"])
def test_a_checkpoint_from_before_the_first_batch_goes_on_bit_for_bit(
    captured: bool, tmp_path: Path
) -> None:
    def losses(engine: spmdzero.Engine) -> list[float]:
        if captured:
            return [engine.train_batch().item() for _ in range(3)]
        return by_hand(engine, range(1), stop=3)

    engine = start(Augmented())
    engine.save_checkpoint(tmp_path)
    undisturbed = losses(engine)
    resumed = start(Augmented())
    resumed.load_checkpoint(tmp_path)
    assert losses(resumed) == undisturbed


def test_a_failed_load_leaves_the_loader_as_it_was(tmp_path: Path) -> None:
    engine = start(Augmented())
    engine.save_checkpoint(tmp_path)
    loader = engine.training_dataloader
    assert loader is not None

    def broken(**_: Any) -> None:
        raise OSError("unreadable")

    seen = 0
    for batch in loader:
        engine.backward(engine(*batch))
        engine.step()
        seen += 1
        if seen == 2:
            with pytest.raises(OSError, match="unreadable"):
                engine.load_checkpoint(tmp_path, custom_load_fn=broken)
    assert seen == 5
    assert len(list(loader)) == 5


def test_loading_the_module_alone_leaves_train_batch_where_it_is_in_its_epoch(
    tmp_path: Path,
) -> None:
    engine = start(Augmented())
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    engine.train_batch()
    assert engine.training_dataloader is not None
    assert engine.training_dataloader.state_dict()["handed_out"] == 2
