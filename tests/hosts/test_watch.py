"""What many hosts know of each other, each of which listens to a few."""

import time

import pytest
import torch.distributed as dist

from spmdzero.backend.hosts._watch import ALIVE, VERDICT, Sign, Watch

COUNT, TIMEOUT = 40, 0.3


@pytest.fixture
def watches() -> list[Watch]:
    """One for each host, on torch's own store; their threads aren't started."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key in (VERDICT, *(f"host/{rank}" for rank in range(COUNT))):
        store.set(key, Sign(ALIVE).to_json())
    names = [f"worker-{rank}" for rank in range(COUNT)]
    made = [Watch(store, rank=rank, names=names) for rank in range(COUNT)]
    for watch in made:
        watch.timeout = TIMEOUT
    return made


def beat(watches: list[Watch], *, without: int) -> None:
    for rank, watch in enumerate(watches):
        if rank != without:
            watch.beat()


def test_a_host_that_fails_is_known_to_all(watches: list[Watch]) -> None:
    beat(watches, without=-1)
    assert all(watch.verdict() is None for watch in watches)
    watches[30].end_by(ValueError("no rows"))
    beat(watches, without=30)
    assert {watch.verdict() for watch in watches if watch is not watches[30]} == {
        (30, "is gone: it failed: ValueError: no rows")
    }


def test_a_host_that_is_silent_is_found_by_its_neighbours_and_then_known_to_all(
    watches: list[Watch],
) -> None:
    beat(watches, without=20)
    time.sleep(2 * TIMEOUT)
    beat(watches, without=20)
    found = {rank: watch.verdict() for rank, watch in enumerate(watches) if rank != 20}
    finders = [rank for rank, verdict in found.items() if verdict]
    assert finders == [12, 13, 14, 15, 16, 17, 18, 19]
    why = f'is gone: it gave no sign of life for {TIMEOUT:g} s ("spmd": {{"timeout": {TIMEOUT:g}}})'
    assert {found[rank] for rank in finders} == {(20, why)}
    # As `stop` does, before it ends the process.
    watches[15]._tell_last(Sign("blames", why, 20))
    beat(watches, without=20)
    others = [watch for rank, watch in enumerate(watches) if rank not in (15, 20)]
    assert {watch.verdict() for watch in others} == {(20, why)}


def test_a_host_that_came_to_another_thing_is_found(watches: list[Watch]) -> None:
    for rank, watch in enumerate(watches):
        watch.joint.come_to("a save" if rank == 20 else "training on x [8, 3]")
    beat(watches, without=-1)
    beat(watches, without=-1)
    found = [watch.verdict() for watch in watches]
    assert found[19] is not None
    assert found[19][0] == 20
    assert "came to a save, host 19 to training on x [8, 3]" in found[19][1]
    assert found[30] is None
