"""Which hosts still live: one that dies, fails or freezes ends the others, with its name.

Each process tells a small store of torch's, which the first one keeps, twice a second or so how it
is, and reads how the next few are, and whether anybody has found one to be gone: of a thousand
hosts each would otherwise read a thousand signs, and the store couldn't answer. Where the devices
wait for a host that will never come, no exception can reach the thread that waits: so a thread of
its own says what happened, and ends the process.
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
"""With which a process ends because another one has; sysexits.h: a failure that may pass."""
DEFAULT_TIMEOUT = 60.0
ALIVE, _DONE, _FAILED, _BLAMES = "alive", "done", "failed", "blames"
# A host of which a connection broke has to be silent for so many beats only.
_SUSPECTED = 6
# Hosts that each listens to, beside the first: one of them ends where its neighbours end, too.
_NEIGHBOURS = 8
VERDICT = "verdict"
"""Where in the store stands what anybody has found; it says that all are well at first."""


@dataclasses.dataclass(frozen=True)
class Sign:
    """What a process tells the others.

    Attributes:
        state: alive, done, failed, or ending because it blames another.
        detail: why.
        blamed: the host that is gone.
        by: who says so.
        joint: what it came to that all hosts do together.
        count: another at each beat.
    """

    state: str
    detail: str = ""
    blamed: int = -1
    by: int = -1
    joint: Place = START
    count: int = 0

    def to_json(self) -> str:
        """As the store keeps it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Sign":
        """What `to_json` wrote."""
        found = json.loads(text)
        return cls(**found | {"joint": tuple(found["joint"])})


class Watch:
    """Beats for this process, and listens to others: of up to nine hosts, to all.

    Args:
        store: torch's `TCPStore` of all processes; the first one keeps it.
        rank: of this process.
        names: of the hosts.

    Attributes:
        timeout: seconds in which a host must give a sign of life.
        newest: finds the checkpoint that an error names; None where there is none.
        failed: whether this process ends by an exception of its own.
        waits_since: when it began to wait for what all hosts do together; None while it doesn't.
        latest: when the latest program was started, and whether it still runs.
        joint: what this process came to that all hosts do together.
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
        """Starts both threads: the one that talks to the store may stand still with it."""
        self._threads = [
            threading.Thread(target=target, name="spmdzero-watch", daemon=True)
            for target in (self._beat_on, self._judge_on)
        ]
        for thread in self._threads:
            thread.start()

    def beat(self) -> None:
        """Tells how this process is, and takes down how the others are."""
        peers = list(self._heard)
        with self._lock:
            self._count += 1
            more = {"by": self._rank, "joint": self.joint.latest, "count": self._count}
            own = dataclasses.replace(self._own, **more)
            self._store.set(f"host/{self._rank}", own.to_json())
            if own.state in (_FAILED, _BLAMES):
                # Of several that come at once one stays, and each names a host that is gone.
                self._store.set(VERDICT, own.to_json())
            *told, verdict = self._store.multi_get([*(f"host/{p}" for p in peers), VERDICT])
        now = time.monotonic()
        self._verdict = Sign.from_json(verdict)
        for peer, text in zip(peers, told, strict=True):
            sign = Sign.from_json(text)
            if self._said.get(peer) != sign:
                self._said[peer], self._heard[peer] = sign, now
        # The first process has answered, whatever it says of itself.
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
                # This process stood still itself, as all do after Ctrl-Z.
                self._heard = dict.fromkeys(self._heard, now)
            looked, found = now, self.verdict()
            if found is not None:
                self.stop(*found)
            time.sleep(self.pause / 2)

    def verdict(self) -> tuple[int, str] | None:
        """The host that is gone, and why; None where all are well."""
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
                # It keeps the store: who can't ask it knows nothing of the rest. The first process
                # itself can't ask where its network is lost, and hears of nobody then.
                break
        return None

    def _is_done(self, peer: int) -> bool:
        return peer in self._said and self._said[peer].state == _DONE

    def stop(self, peer: int, why: str) -> None:
        """Says which host is gone, and ends this process."""
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
        # The device runtime would wait at its end for the host that is gone, and then abort.
        os._exit(STATUS)

    def end_by(self, error: BaseException) -> None:
        """This process is about to end by an exception of its own."""
        if os.getpid() != self._process or self._ended:
            return
        self.failed = True
        text = str(error).splitlines()
        said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        self._tell_last(Sign(_FAILED, f"it failed: {said}"))

    def suspect(self) -> None:
        """Something says that a host is lost: a few beats of silence are enough from now on."""
        self._suspects = True

    def await_verdict(self) -> None:
        """Something says that a host is lost: returns only where none is found to be."""
        if os.getpid() != self._process:
            return
        self.suspect()
        deadline = time.monotonic() + min(self.timeout, 2 * self.pause * _SUSPECTED)
        while time.monotonic() < deadline:
            # The thread that finds it ends the process.
            time.sleep(self.pause)

    def leave(self) -> None:
        """At the end of the process: the others don't wait for it."""
        if os.getpid() == self._process and not self._ended and not self.failed:
            self._tell_last(Sign(_DONE))
            self._ended = True
            for thread in self._threads:
                # A thread that comes back from the store while Python takes itself apart is ended
                # in the midst of C++, which aborts the process.
                thread.join(self.pause * 4)

    def _tell_last(self, sign: Sign) -> None:
        self._own = sign
        if self._lost_store:
            return
        # The store may be gone, or stand still with the host that keeps it.
        telling = threading.Thread(target=self._beat_quietly, daemon=True)
        telling.start()
        telling.join(self.pause * 4)
        if self._rank == 0:
            # It keeps the store, in which the others are to read this.
            time.sleep(self.pause * 4)

    def _beat_quietly(self) -> None:
        with contextlib.suppress(Exception):
            self.beat()
