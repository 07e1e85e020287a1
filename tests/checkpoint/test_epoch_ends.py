"""What a resumed loader yields: the batches that the run which wasn't stopped would have seen."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from spmdzero.backend import RegionRules, current
from spmdzero.data._inputs import InputPlacer
from spmdzero.engine import ReplicaBatchSampler, ZeroDataLoader
from spmdzero.plan import MeshSpec

ROWS, EPOCH = 80, 5  # five micro-batches of 8 devices x 2
MESH = current().mesh(MeshSpec((("fsdp", 8),)))
pytestmark = pytest.mark.usefixtures("mesh")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(row)]), torch.tensor(row)) for row in range(ROWS))


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1), torch.tensor(index)


class Run:
    """A script's loader, and what it has trained; no device computes anything."""

    def __init__(self, data: Any = None, *, rows: int = ROWS, micro: int = 2) -> None:
        numbers = TensorDataset(torch.arange(rows).float()[:, None], torch.arange(rows))
        self.data, self.trained = data or numbers, 0
        placer = InputPlacer(
            mesh=MESH, module=nn.Linear(1, 1), rules=RegionRules(), micro_batch=micro
        )
        self.loader = ZeroDataLoader(
            self.data, mesh=MESH, placer=placer, steps=lambda: self.trained
        )

    def __iter__(self) -> Iterator[list[int]]:
        """One loop of training: the rows of its micro-batches."""
        for _, y in self.loader:
            self.trained += 1
            yield y.cpu().tolist()

    def peek(self) -> None:
        next(iter(self.loader))

    def resumed(self, *, micro: int = 2) -> "Run":
        again = Run(self.data, micro=micro)
        again.loader.load_state_dict(self.loader.state_dict())
        return again


def epoch(number: int, data: Any = None) -> list[list[int]]:
    run = Run(data)
    run.loader.set_epoch(number)
    return list(run)


def test_after_a_finished_loop_comes_a_whole_one() -> None:
    run = Run()
    list(run)
    assert list(run.resumed()) == epoch(0)  # as a second loop without set_epoch would be
    for number in (0, 1):
        resumed = run.resumed()
        resumed.loader.set_epoch(number)
        assert list(resumed) == epoch(number)


def test_an_epoch_that_was_chosen_but_not_begun_comes_whole() -> None:
    for stop in (1, EPOCH, None):
        run = Run()
        list(islice(run, stop))
        run.loader.set_epoch(1)
        assert list(run.resumed()) == epoch(1)


@pytest.mark.parametrize("data", [None, Stream()], ids=["rows", "stream"])
def test_inside_a_loop_the_rest_comes_or_a_whole_epoch_of_another_number(data: Any) -> None:
    for handed_out in range(1, EPOCH + 1):
        run = Run(data)
        run.loader.set_epoch(3)
        loop = iter(run)
        done = list(islice(loop, handed_out))
        resumed = run.resumed()
        assert [*done, *resumed] == epoch(3, data)
        assert list(resumed) == epoch(3, data)
        for number in (2, 3, 4):
            resumed = run.resumed()
            resumed.loader.set_epoch(number)
            assert [*(done if number == 3 else []), *resumed] == epoch(number, data)
        assert [*done, *loop] == epoch(3, data)


def test_an_epoch_chosen_at_the_sampler_counts_as_well() -> None:
    run = Run()
    loop = iter(run)
    next(loop)
    resumed = run.resumed()
    assert resumed.loader.sampler is not None
    resumed.loader.sampler.set_epoch(1)
    assert list(resumed) == epoch(1)


def test_an_empty_rest_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    loop = iter(run)
    list(islice(loop, EPOCH))
    resumed = run.resumed()
    with caplog.at_level("INFO", logger="spmdzero"):
        assert list(resumed) == []
        assert "epoch 0 was saved after its last micro-batch" in caplog.text
        caplog.clear()
        assert list(resumed) == epoch(0)
    assert not caplog.records


def test_a_loop_that_is_broken_off_goes_on_and_so_does_one_over_and_over() -> None:
    run = Run()
    done = list(islice(run, 2))
    assert [*done, *run.resumed()] == epoch(0)
    for stop in (EPOCH - 1, EPOCH, EPOCH + 1):
        run = Run()
        run_on = run.loader.endless()
        seen = [next(run_on)[1].cpu().tolist() for _ in range(stop)]
        seen += [y.cpu().tolist() for _, y in islice(run.resumed().loader.endless(), 2 * EPOCH)]
        assert seen[: 2 * EPOCH] == epoch(0) + epoch(1)


def test_a_look_at_the_data_moves_nothing() -> None:
    run = Run(Drawing())
    run.peek()
    assert list(run.resumed()) == epoch(0)
    loop = iter(run)
    done = [next(loop)]
    run.peek()
    done.append(next(loop))
    run.peek()
    resumed = run.resumed()
    generator = torch.get_rng_state()
    resumed.peek()
    resumed.peek()
    assert torch.equal(torch.get_rng_state(), generator)
    assert [*done, *resumed.resumed()] == [*done, *resumed] == epoch(0)
    assert list(resumed) == epoch(0)


def test_the_position_is_that_of_the_loop_which_training_takes_from() -> None:
    run = Run()
    loop, second = iter(run), iter(run.loader)
    done = [next(loop)]
    next(second)
    done += [next(loop), next(loop)]
    assert [*done, *run.resumed()] == epoch(0)


def test_an_interrupted_loop_that_trained_nothing_begins_again_where_it_was_resumed() -> None:
    run = Run()
    loop = iter(run)
    done = [next(loop)]
    resumed = run.resumed()
    interrupted = iter(resumed.loader)
    next(interrupted)
    assert [*done, *resumed] == epoch(0)


def test_the_end_of_an_epoch_is_its_end_in_other_micro_batches() -> None:
    run = Run(rows=70)  # four micro-batches and a short one
    loop = iter(run)
    assert len(list(islice(loop, EPOCH))[-1]) == 8
    for micro in (1, 2, 3):
        assert list(run.resumed(micro=micro)) == []


def test_another_size_of_micro_batch_goes_on_at_the_same_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    list(islice(run, 2))
    whole = list(Run(micro=1))
    assert len(whole) == 10
    assert list(run.resumed(micro=1)) == whole[4:]
    assert "seen again" not in caplog.text
    run = Run(micro=1)
    list(islice(run, 3))
    assert list(run.resumed()) == epoch(0)[1:]
    assert "after 24 samples" in caplog.text
    assert "8 samples are seen again" in caplog.text


def test_a_state_from_before_ends_were_noted_goes_on() -> None:
    run = Run()
    loop = iter(run)
    done = [next(loop)]
    state = run.loader.state_dict()
    del state["finished"]
    resumed = Run()
    resumed.loader.load_state_dict(state)
    assert resumed.loader.state_dict()["finished"] is False
    assert [*done, *resumed] == epoch(0)


def test_two_iterations_at_once_keep_their_own_seeds_for_worker_processes() -> None:
    batches = ReplicaBatchSampler(length=80, micro_batch=2, replicas=8, local_replicas=range(8))
    batches.skip(0, seed=1)
    seeds = []
    for rows in batches:
        seeds.append(rows.seed)
        batches.skip(0, seed=2)
        next(iter(batches))
    batches.skip(2, seed=1)
    assert seeds[2:] == [rows.seed for rows in batches]
