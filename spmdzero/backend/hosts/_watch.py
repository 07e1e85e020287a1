"""Watches which hosts live: if one dies, fails or freezes, the others name it and end.

Each process writes its state to a small store of torch's, which the first process serves, about
twice a second. It reads the states of its next few neighbours, and whether any process has found a
host to be gone: if each of a thousand hosts read a thousand states, the store couldn't answer.
Where the devices wait for a host that will never come, no exception can reach the waiting thread:
so another thread prints what happened, and ends the process.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from spmdzero._to_launcher import tell
from spmdzero.backend.hosts._joint import CAME, START, Joint, Place, at

STATUS = 75
"""Exit status of a process that ends because of another; in sysexits.h a failure that may pass."""
DEFAULT_TIMEOUT = 60.0
ALIVE, _DONE, _FAILED, _BLAMES = "alive", "done", "failed", "blames"
# Beats of silence that are enough to blame a host once a connection has broken.
_SUSPECTED = 6
# Number of neighbours that each host listens to beside the first: if one ends, so do they.
_NEIGHBOURS = 8
VERDICT = "verdict"
"""Key of the store's verdict: a sign that blames a host, or at first that all are well."""


@dataclasses.dataclass(frozen=True)
class Sign:
    """The state that a process tells the others.

    Attributes:
        state: alive, done, failed, or ending because it blames another host.
        detail: the reason.
        blamed: rank of the host that is gone.
        by: rank of the process that says so.
        joint: the process's place among the joint operations.
        count: number of the beat, so that each sign differs from the one before.
    """

    state: str
    detail: str = ""
    blamed: int = -1
    by: int = -1
    joint: Place = START
    count: int = 0

    def to_json(self) -> str:
        """The sign as text for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Sign":
        """The sign that `to_json` wrote."""
        found = json.loads(text)
        return cls(**found | {"joint": tuple(found["joint"])})


class Watch:
    """Sends the beats of this process to all, and listens to those of up to nine hosts.

    Args:
        store: torch's `TCPStore` of all processes; the first one serves it.
        rank: of this process.
        names: of the hosts, by rank.

    Attributes:
        timeout: seconds without a sign of life after which a host is gone.
        newest: finds the checkpoint that an error names; returns None where there is none.
        failed: whether this process ends by an exception of its own.
        waits_since: when it began to wait for a joint operation; None while it doesn't wait.
        latest: when the latest program was started, and a function that says whether it still runs.
        joint: the joint operations of this process.
    """

    def __init__(self, store: Any, *, rank: int, names: list[str]) -> None:
        self.timeout, self.failed = DEFAULT_TIMEOUT, False
        self.waits_since: float | None = None
        self.latest: tuple[float, Callable[[], bool]] = (0.0, lambda: False)
        self.newest: Callable[[], str | None] = lambda: None
        self._store, self._rank, self._names = store, rank, names
        self._process = os.getpid()
        self.joint = Joint()
        self._own, self._count = Sign(ALIVE), 0
        now = time.monotonic()
        count = len(names)
        near = [(rank + step) % count for step in range(min(count, _NEIGHBOURS + 1))]
        self._heard = dict.fromkeys(sorted({0, *near}), now)
        self._said: dict[int, Sign] = {}
        self._verdict = Sign(ALIVE)
        self._lost_store = ""
        self._suspects, self._ended = False, False
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def pause(self) -> float:
        """Seconds between two beats."""
        return min(max(self.timeout / 60, 0.1), 0.5)

    def start(self) -> None:
        """Starts two threads: one talks to the store, which may freeze, the other judges."""
        self._threads = [
            threading.Thread(target=target, name="spmdzero-watch", daemon=True)
            for target in (self._beat_on, self._judge_on)
        ]
        for thread in self._threads:
            thread.start()

    def beat(self) -> None:
        """Writes the state of this process to the store, and reads the states of the others."""
        peers = list(self._heard)
        with self._lock:
            self._count += 1
            more = {"by": self._rank, "joint": self.joint.latest, "count": self._count}
            own = dataclasses.replace(self._own, **more)
            self._store.set(f"host/{self._rank}", own.to_json())
            if own.state in (_FAILED, _BLAMES):
                # If several processes write at once one verdict stays, and each names a host that
                # is gone.
                self._store.set(VERDICT, own.to_json())
            *told, verdict = self._store.multi_get([*(f"host/{p}" for p in peers), VERDICT])
        now = time.monotonic()
        self._verdict = Sign.from_json(verdict)
        for peer, text in zip(peers, told, strict=True):
            sign = Sign.from_json(text)
            if self._said.get(peer) != sign:
                self._said[peer], self._heard[peer] = sign, now
        # The first process served this answer, whatever its own sign says.
        self._heard[0] = now

    def _beat_on(self) -> None:
        while not self._ended:
            try:
                self.beat()
            except Exception as error:
                self._lost_store = f"is gone: its connection is lost ({str(error).splitlines()[0]})"
                return
            time.sleep(self.pause)

    def _judge_on(self) -> None:
        looked = time.monotonic()
        while not self._ended:
            now = time.monotonic()
            if now - looked > self.timeout / 2:
                # This process itself stood still, as all do after Ctrl-Z.
                self._heard = dict.fromkeys(self._heard, now)
            looked, found = now, self.verdict()
            if found is not None:
                self.stop(*found)
            time.sleep(self.pause / 2)

    def verdict(self) -> tuple[int, str] | None:
        """The rank of the host that is gone, and the reason; None where all are well."""
        if self._ended or self._own.state != ALIVE:
            return None
        said = dict(self._said)
        if self._verdict.state != ALIVE:
            said[self._verdict.by] = self._verdict
        for peer, sign in said.items():
            if peer == self._rank:
                continue
            if sign.state == _FAILED:
                return peer, f"is gone: {sign.detail}"
            if sign.state == _BLAMES and sign.blamed != self._rank:
                return sign.blamed, sign.detail
            if sign.state == _BLAMES:
                return peer, f"ended: host {self._rank} {sign.detail}"
            if apart := self.joint.apart(sign.joint, here=f"host {self._rank}"):
                return peer, apart
        if self._lost_store and not self._is_done(0):
            return 0, self._lost_store
        return self._left_behind() or self._silent()

    def _left_behind(self) -> tuple[int, str] | None:
        ended = [peer for peer in self._heard if peer != self._rank and self._is_done(peer)]
        if not ended:
            return None
        begun, runs = self.latest
        since = self.waits_since or (begun if runs() else None)
        if since is not None and time.monotonic() - since > self.timeout:
            *_, where = self.joint.latest
            waits = f"and host {self._rank} waits {self.timeout:g} s for it{at(where)}"
            return ended[0], f"{CAME} its end, {waits}"
        return None

    def _silent(self) -> tuple[int, str] | None:
        allowed = self.timeout
        if self._suspects:
            allowed = min(allowed, self.pause * _SUSPECTED)
        now = time.monotonic()
        for peer, heard in self._heard.items():
            if peer != self._rank and now - heard > allowed and not self._is_done(peer):
                if self._suspects:
                    return peer, f"is gone: its connection is lost, and {allowed:.3g} s of silence"
                config = f'"spmd": {{"timeout": {allowed:g}}}'
                return peer, f"is gone: it gave no sign of life for {allowed:g} s ({config})"
            if peer == 0 != self._rank and now - heard > self.pause * 4:
                # The first process serves the store: a host that can't ask it knows nothing of the
                # rest. And the first process itself, if its network is lost, hears of nobody.
                break
        return None

    def _is_done(self, peer: int) -> bool:
        return peer in self._said and self._said[peer].state == _DONE

    def stop(self, peer: int, why: str) -> None:
        """Prints which host is gone, and ends this process."""
        self._ended = True
        self._tell_last(Sign(_BLAMES, why, peer))
        newest = None
        with contextlib.suppress(Exception):
            newest = self.newest()
        found = (
            f"The newest complete checkpoint is {newest}" if newest else "There is no checkpoint"
        )
        print(
            f"spmdzero: host {peer} ({self._names[peer]}) {why}. Host {self._rank} can't go "
            f"on without it and ends with status {STATUS}. {found}.",
            file=sys.stderr,
        )
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        tell("blames", [peer, CAME in why])
        # At its end the device runtime would wait for the host that is gone, and then abort.
        os._exit(STATUS)

    def end_by(self, error: BaseException) -> None:
        """Tells the others that this process is about to end by an exception of its own."""
        if os.getpid() != self._process or self._ended:
            return
        self.failed = True
        text = str(error).splitlines()
        said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        self._tell_last(Sign(_FAILED, f"it failed: {said}"))

    def suspect(self) -> None:
        """Allows only a few beats of silence from now on: something says that a host is lost."""
        self._suspects = True

    def await_verdict(self) -> None:
        """Waits for a verdict after a sign that a host is lost; returns only if there is none."""
        if os.getpid() != self._process:
            return
        self.suspect()
        deadline = time.monotonic() + min(self.timeout, 2 * self.pause * _SUSPECTED)
        while time.monotonic() < deadline:
            # The judging thread ends the process if it finds one.
            time.sleep(self.pause)

    def leave(self) -> None:
        """Tells the others, at the end of this process, not to wait for it."""
        if os.getpid() == self._process and not self._ended and not self.failed:
            self._tell_last(Sign(_DONE))
            self._ended = True
            for thread in self._threads:
                # Python ends a thread that comes back from the store during its shutdown in the
                # midst of C++, which aborts the process.
                thread.join(self.pause * 4)

    def _tell_last(self, sign: Sign) -> None:
        self._own = sign
        if self._lost_store:
            return
        # The store may be gone, or freeze with the host that serves it.
        telling = threading.Thread(target=self._beat_quietly, daemon=True)
        telling.start()
        telling.join(self.pause * 4)
        if self._rank == 0:
            # This process serves the store, in which the others still have to read the sign.
            time.sleep(self.pause * 4)

    def _beat_quietly(self) -> None:
        with contextlib.suppress(Exception):
            self.beat()
