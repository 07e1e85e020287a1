"""Waiting for the other hosts of a job to come: says for whom, and ends by Ctrl-C.

torch waits in C++, silent and deaf to signals. So a thread of its own talks to the store in which
every host writes that it is here, and this one waits in slices.
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
"""Variable in which a launcher names the hosts, with commas between them."""
# Seconds of waiting after which it is said, and between two lines; those of one slice.
_FIRST, _EACH, _SLICE = 5.0, 30.0, 0.2
# Seconds between two questions to the store; which of a thousand hosts are missing costs more.
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
        connect: makes the store, and may wait for the first host as long as it likes.
        rank: of this host.
        count: of all hosts.
        where: they are waited for, as in ``"at worker-0:29500"``.
        timeout: for all of it.

    Raises:
        SpmdZeroRuntimeError: hosts are missing after `timeout`; it names them.
    """
    call = _Call(connect, rank, count)

    def late() -> SpmdZeroRuntimeError:
        # The launcher goes by that where it starts again without a host.
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
    """What `call` returns, which waits in C++; this thread hears Ctrl-C meanwhile.

    After 5 s, and then each 30 s, it says on stderr that it waits.

    Args:
        call: runs in a thread of its own, and goes on there where this one leaves.
        name: the thread's.
        what: says at any time what is waited for.
        timeout: for all of it.
        late: makes what is raised after `timeout`.
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
    """The store that torch makes at this address, which the first process keeps.

    torchrun keeps it itself, and says so by a variable.
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
        # torch's own, made next, is served by this one.
        multi_tenant=True,
    )


def _await_listener(address: str, port: int, timeout: datetime.timedelta) -> None:
    """torch's client prints its frames where nobody listens yet."""
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
    """What talks to the store, in a thread of its own.

    Attributes:
        missing: ranks of hosts that haven't come yet, as far as is known.
        left: whether nobody waits for it any more.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, count: int) -> None:
        self._connect, self._rank = connect, rank
        self._others = [other for other in range(count) if other != rank]
        # Nothing is known of the rest before the first has answered.
        self.missing = self._others if rank == 0 else [0]
        self.left = False

    def run(self) -> Any:
        """The store, once all have come."""
        store = self._connect()
        store.set(_key(self._rank), "here")
        self.missing, looked = self._others, time.monotonic()
        while not self.left and not store.check([_key(rank) for rank in self.missing]):
            if time.monotonic() - looked > _LOOK:
                # Where the last have come meanwhile, the next question finds them all here.
                missing = [rank for rank in self.missing if not store.check([_key(rank)])]
                self.missing, looked = missing or self.missing, time.monotonic()
            time.sleep(_PAUSE)
        return store


def _key(rank: int) -> str:
    return f"spmdzero/here/{rank}"
