import itertools
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from spmdzero.data._sampler import ReplicaBatchSampler
from spmdzero.errors import SpmdZeroUsageError

pytestmark = pytest.mark.backends("any")

SIZES = st.fixed_dictionaries(
    {
        "length": st.integers(1, 70),
        "micro_batch": st.integers(1, 6),
        "replicas": st.integers(1, 9),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
        "drop_last": st.booleans(),
    }
)


def deepspeed_rank(sizes: dict[str, Any], *, rank: int, epoch: int) -> list[list[int]]:
    sampler = DistributedSampler(
        range(sizes["length"]),
        num_replicas=sizes["replicas"],
        rank=rank,
        shuffle=sizes["shuffle"],
        seed=sizes["seed"],
    )
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, sizes["micro_batch"], sizes["drop_last"]))


def make(sizes: dict[str, Any], local_replicas: range | None = None) -> ReplicaBatchSampler:
    return ReplicaBatchSampler(**sizes, local_replicas=local_replicas or range(sizes["replicas"]))


@settings(deadline=None)
@given(sizes=SIZES, epoch=st.integers(0, 2), data=st.data())
def test_every_replica_gets_the_rows_of_its_deepspeed_rank(
    sizes: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, sizes["replicas"] - 1))
    local = range(first, data.draw(st.integers(first + 1, sizes["replicas"])))
    sampler = make(sizes, local)
    sampler.set_epoch(epoch)
    ranks = [deepspeed_rank(sizes, rank=rank, epoch=epoch) for rank in local]
    expected = [list(chain(*batches)) for batches in zip(*ranks, strict=True)]
    assert list(sampler) == expected
    assert len(sampler) == len(expected)


def test_default_is_deepspeeds_shuffled_loader_with_seed_0() -> None:
    sampler = ReplicaBatchSampler(length=37, micro_batch=3, replicas=4, local_replicas=range(2, 3))
    rank = DistributedSampler(range(37), num_replicas=4, rank=2)
    assert list(sampler) == list(BatchSampler(rank, 3, False))


def test_hosts_in_order_make_up_the_same_global_micro_batches() -> None:
    for hosts, drop_last in itertools.product((1, 2, 4), (False, True)):
        sizes = {"length": 101, "micro_batch": 3, "replicas": 8, "drop_last": drop_last}
        each = 8 // hosts
        parts = [make(sizes, range(host * each, (host + 1) * each)) for host in range(hosts)]
        together = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
        assert together == list(make(sizes))
        # 101 rows on 8 replicas are 13 each: 4 whole micro-batches of 3, and 1 row.
        assert [len(batch) for batch in together] == [24] * 4 + ([] if drop_last else [8])


def test_fewer_rows_than_replicas_repeat() -> None:
    sizes = {"length": 2, "micro_batch": 4, "replicas": 5, "shuffle": False}
    assert list(make(sizes)) == [[0, 1, 0, 1, 0]]


def test_each_epoch_has_its_own_order() -> None:
    sampler = make({"length": 50, "micro_batch": 5, "replicas": 2})
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


@settings(deadline=None)
@given(sizes=SIZES, data=st.data())
def test_after_a_skip_comes_the_rest_and_then_everything(
    sizes: dict[str, Any], data: st.DataObject
) -> None:
    sampler = make(sizes)
    sampler.set_epoch(3)
    whole = list(sampler)
    skipped = data.draw(st.integers(0, len(sampler)))
    sampler.skip(skipped)
    assert list(sampler) == whole[skipped:]
    assert list(sampler) == whole


def test_a_broken_off_iteration_starts_over() -> None:
    sampler = make({"length": 20, "micro_batch": 2, "replicas": 2})
    next(iter(sampler))
    assert len(list(sampler)) == 5


def test_skip_outside_the_epoch_is_an_error() -> None:
    sampler = make({"length": 20, "micro_batch": 2, "replicas": 2})
    for batches in (-1, 6):
        with pytest.raises(SpmdZeroUsageError, match="5 micro-batches"):
            sampler.skip(batches)


def test_sampler_drives_a_torch_data_loader() -> None:
    rows = torch.arange(12)
    sampler = make({"length": 12, "micro_batch": 2, "replicas": 3, "shuffle": False})
    loader = DataLoader(TensorDataset(rows), batch_sampler=sampler)
    assert [batch.tolist() for (batch,) in loader] == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]


def test_sizes_that_make_no_sense_are_errors() -> None:
    sizes = {"length": 8, "micro_batch": 2, "replicas": 4, "local_replicas": range(4)}
    ranges = [range(0), range(1, 5), range(-1, 2)]
    wrong = [("length", 0), ("micro_batch", 0), ("replicas", 0)]
    for name, value in [*wrong, *(("local_replicas", part) for part in ranges)]:
        with pytest.raises(SpmdZeroUsageError, match=name):
            ReplicaBatchSampler(**sizes | {name: value})
