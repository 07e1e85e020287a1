"""Waiting for the other hosts of a job: it names the missing ones, and Ctrl-C ends it.

torch waits in C++, prints nothing and ignores signals. So another thread talks to the store, in
which every host writes that it is here, and this thread waits in slices.
"""

import contextlib
import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from spmdzero._names import listed
from spmdzero._to_launcher import tell
from spmdzero.errors import SpmdZeroRuntimeError

HOSTS = "SPMDZERO_HOSTS"
"""The variable in which a launcher lists the names of the hosts, separated by commas."""
# Seconds until the first message, between two messages, and of one slice of waiting.
_FIRST, _EACH, _SLICE = 5.0, 30.0, 0.2
# Seconds between two questions to the store. Asking which of a thousand hosts are missing costs
# more, and is done less often.
_PAUSE, _LOOK = 0.05, 1.0
_CONNECT = 2.0
_SHOWN = 8


def call_roll(
    connect: Callable[[], Any],
    *,
    rank: int,
    count: int,
    where: str,
    timeout: datetime.timedelta,
) -> Any:
    """Returns the store once each of `count` hosts has come to it.

    After 5 s, and then each 30 s, it says on stderr which hosts are missing.

    Args:
        connect: creates the store, and may wait as long as it likes for the first host.
        rank: of this host.
        count: number of hosts.
        where: the meeting place, as in ``"at worker-0:29500"``.
        timeout: of the whole call.

    Raises:
        SpmdZeroRuntimeError: hosts are missing after `timeout`; it names them.
    """
    call = _Call(connect, rank, count)

    def late() -> SpmdZeroRuntimeError:
        # The launcher reads this when it starts again without a host.
        tell("blames", [call.missing[0], False])
        return SpmdZeroRuntimeError(
            f"{_named(call.missing, count)} didn't come {where} in {timeout.total_seconds():g} s "
            f"(DEEPSPEED_TIMEOUT counts minutes). Host {rank} can't train without: see whether the "
            "script runs there, and whether that address is reached from there"
        )

    try:
        return in_slices(
            call.run,
            name="spmdzero-roll-call",
            what=lambda: f"waiting for {_named(call.missing, count)} {where}",
            timeout=timeout,
            late=late,
        )
    finally:
        call.left = True


def in_slices(
    call: Callable[[], Any],
    *,
    name: str,
    what: Callable[[], str],
    timeout: datetime.timedelta,
    late: Callable[[], Exception],
) -> Any:
    """The result of `call`, which waits in C++; meanwhile this thread hears Ctrl-C.

    After 5 s, and then every 30 s, it says on stderr that it waits.

    Args:
        call: runs in another thread, and goes on there after this one has left.
        name: of the thread.
        what: returns the description of the wait at any time.
        timeout: of the whole call.
        late: creates the error that is raised after `timeout`.
    """
    returned, raised = list[Any](), list[BaseException]()

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    begun, next_line, limit = time.monotonic(), _FIRST, timeout.total_seconds()
    thread.start()
    while True:
        thread.join(_SLICE)
        if not thread.is_alive():
            break
        waited = time.monotonic() - begun
        if waited > limit:
            raise late()
        if waited > next_line:
            next_line += _EACH
            line = f"spmdzero: {what()}: {waited:.0f} s of {limit:g} s"
            print(line, file=sys.stderr, flush=True)
    if raised:
        raise raised[0]
    return returned[0]


def tcp_store(address: str, port: int, *, rank: int, timeout: datetime.timedelta) -> Any:
    """The store that torch makes at this address; the first process serves it.

    Under torchrun the agent serves it, and an environment variable says so.
    """
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not keeps:
        _await_listener(address, port, timeout)
    return dist.TCPStore(
        address,
        port,
        is_master=keeps,
        timeout=timeout,
        wait_for_workers=False,
        # The store that torch makes next shares this server.
        multi_tenant=True,
    )


def _await_listener(address: str, port: int, timeout: datetime.timedelta) -> None:
    """Waits for a listener: without one, torch's client prints its stack frames."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=_CONNECT).close()
            return
        time.sleep(_SLICE)


def _named(ranks: Sequence[int], count: int) -> str:
    names = os.environ.get(HOSTS, "").split(",")
    shown = [f"{rank} ({names[rank]})" if len(names) == count else f"{rank}" for rank in ranks]
    return f"host{'s' if len(ranks) > 1 else ''} {listed(shown, most=_SHOWN)} of {count}"


class _Call:
    """Talks to the store in another thread.

    Attributes:
        missing: ranks of the hosts that haven't come yet, as far as is known.
        left: whether the caller has stopped waiting.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, count: int) -> None:
        self._connect, self._rank = connect, rank
        self._others = [other for other in range(count) if other != rank]
        # Before the first host has answered, nothing is known of the others.
        self.missing = self._others if rank == 0 else [0]
        self.left = False

    def run(self) -> Any:
        """Waits until all hosts have come, and returns the store."""
        store = self._connect()
        store.set(_key(self._rank), "here")
        self.missing, looked = self._others, time.monotonic()
        while not self.left and not store.check([_key(rank) for rank in self.missing]):
            if time.monotonic() - looked > _LOOK:
                # If the last ones came meanwhile, keep the list: the next question finds them all.
                missing = [rank for rank in self.missing if not store.check([_key(rank)])]
                self.missing, looked = missing or self.missing, time.monotonic()
            time.sleep(_PAUSE)
        return store


def _key(rank: int) -> str:
    return f"spmdzero/here/{rank}"
