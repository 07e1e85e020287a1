"""The watch of this process if it has peers: its start, and events that it has to be told."""

import atexit
import contextlib
import datetime
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from spmdzero._to_launcher import WATCHES, tell
from spmdzero._user_line import user_place
from spmdzero.backend.hosts._launched import own_host
from spmdzero.backend.hosts._meeting import meeting
from spmdzero.backend.hosts._roll_call import call_roll
from spmdzero.backend.hosts._watch import ALIVE, DEFAULT_TIMEOUT, VERDICT, Sign, Watch
from spmdzero.errors import SpmdZeroError

# The others learn its address once the store is there.
_CONNECTING = datetime.timedelta(minutes=1)

_watch: Watch | None = None
_timeout = DEFAULT_TIMEOUT


def watch() -> Watch | None:
    """The watch of this process, None where it is alone."""
    return _watch


def watch_with(*, timeout: float) -> None:
    """Sets the seconds without a sign of life after which a host is gone, now or at the start."""
    global _timeout
    _timeout = timeout
    if _watch is not None:
        _watch.timeout = timeout


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Context around a wait that ends only when other hosts come to it too."""
    if _watch is None:
        yield
        return
    before, _watch.waits_since = _watch.waits_since, _watch.waits_since or time.monotonic()
    try:
        yield
    finally:
        _watch.waits_since = before


def note_started(runs: Callable[[], bool]) -> None:
    """Records a program that all hosts' devices run; `runs` says whether it still runs."""
    if _watch is not None:
        _watch.latest = time.monotonic(), runs


def note_joint(what: str, *, part: bool = False) -> None:
    """Records a joint operation of this process, which all hosts do in one order.

    Args:
        what: its name.
        part: whether it belongs to the one before, as a program to the batch that it runs for.
    """
    if _watch is not None:
        place = user_place()
        _watch.joint.come_to(what, part=part, where="{}:{}".format(*place) if place else "")


def begin() -> None:
    """Makes the hosts of torch.distributed's group watch each other; every process calls it.

    While hosts connect, the device runtime waits for minutes for a host that is gone.
    """
    global _watch
    if _watch is not None or dist.get_world_size() == 1:
        return
    rank = dist.get_rank()
    # A host may be late because of work that its script does before; the group's limit allows it.
    limit = _limit_of_group()
    call_roll(
        dist.distributed_c10d._get_default_store,
        rank=rank,
        count=dist.get_world_size(),
        where="to spmdzero, from what the script does before",
        timeout=limit,
    )
    with meeting(limit):
        store, names = _connected(rank)
    _watch = Watch(store, rank=rank, names=names)
    _watch.timeout = _timeout
    _watch.start()
    atexit.register(_watch.leave)
    _hook(_watch)
    tell(WATCHES, True)


def _limit_of_group() -> datetime.timedelta:
    """The time limit of a collective of torch.distributed's group."""
    gloo = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return gloo.options._timeout


def _connected(rank: int) -> tuple[Any, list[str]]:
    """The store of all processes, after each has written a sign, and the names of their hosts."""
    store: Any = None
    told: list[Any] = [None]
    if rank == 0:
        store = dist.TCPStore(own_host(), 0, is_master=True, wait_for_workers=False)
        store.set(VERDICT, Sign(ALIVE).to_json())
        told = [(own_host(), store.port)]
    dist.broadcast_object_list(told, src=0)
    if rank > 0:
        host, port = told[0]
        store = dist.TCPStore(host, port, is_master=False, timeout=_CONNECTING)
    store.set(f"host/{rank}", Sign(ALIVE).to_json())
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return store, names


def _hook(mine: Watch) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        may_be_anothers = _may_be_anothers(error)
        if may_be_anothers:
            # If a host is lost, this process ends here with the sentence that names the host.
            # Gloo's stack frames would come after it.
            mine.await_verdict()
        try:
            # This fails on a full disk, if stderr is a file there.
            before(kind, error, trace)
        finally:
            mine.end_by(error)

    sys.excepthook = hook


def _may_be_anothers(error: BaseException) -> bool:
    """Whether the runtimes raise such an error when a host that they talk to is lost."""
    text = str(error).lower()
    known = not isinstance(error, SpmdZeroError) and isinstance(error, RuntimeError)
    return known and any(word in text for word in ("gloo", "connection", "socket", "peer"))
