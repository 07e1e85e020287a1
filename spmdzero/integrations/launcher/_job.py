"""Starts the processes of one job, prints their lines with their hosts' names, ends them."""

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from spmdzero._to_launcher import WATCHES, heard
from spmdzero.backend.hosts.processes import STATUS
from spmdzero.errors import HostsDifferError

_LAST_LINES = 10
# Seconds in which the other hosts report which host is gone, and then end.
_TO_SAY_SO = 8.0
# Seconds in which the host that they name may end, too.
_TO_FOLLOW = 3.0
_TO_END = 5.0
_PAUSE = 0.05
_INTERRUPTED = 130
HOSTS_DIFFER = HostsDifferError.__name__
"""The error that each host reports if the hosts' scripts or settings differ."""
# The error if hosts wait at different places: whichever host is blamed, no host is gone, and the
# next start fails in the same way if the script is the cause.
_APART = "the hosts came to different places, where each waited for the others"


@dataclasses.dataclass(frozen=True)
class Command:
    """The command that starts one host's process.

    Attributes:
        name: the host's name, which is printed before each of its lines.
        words: the command line.
        variables: the whole environment of the process.
    """

    name: str
    words: Sequence[str]
    variables: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The cause of a job's failure.

    Attributes:
        host: name of the host that caused the failures of the others.
        status: the host's exit status, as a shell reports it; the first failed host's if it froze.
        error: the host's exception, or the exit that its script asked for, or a note that the hosts
            came to different places; empty if it is none of these.
        repeats: whether the next start would fail by the same error.
    """

    host: str
    status: int
    error: str
    repeats: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a job.

    Attributes:
        status: the failure's status; 0 if all hosts ended well, 130 after Ctrl-C.
        failure: the failure, None in these two cases.
        saved: the newest checkpoint that the job has completed.
        sizes: numbers of hosts on which the batch holds, if the launcher asks for that.
    """

    status: int
    failure: Failure | None = None
    saved: str | None = None
    sizes: Sequence[int] | None = None


class Started:
    """A started process of a host.

    Attributes:
        name: as in `Command`.
        last: the process's last lines.
        told: the latest message of each kind that the process sent to its launcher.
    """

    def __init__(self, command: Command, printing: threading.Lock) -> None:
        self.name, self._printing = command.name, printing
        self.last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.told: dict[str, Any] = {}
        self._heard_out = False
        # The process gets its own session: Ctrl-C reaches only the launcher, which ends all.
        self._process = subprocess.Popen(
            command.words,
            env=command.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        pairs = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._pumps = [
            threading.Thread(target=self._pump, args=pair, daemon=True) for pair in pairs
        ]
        for pump in self._pumps:
            pump.start()

    def _pump(self, source: IO[str], target: IO[str]) -> None:
        with source:
            self._pass_on(source, target)

    def _pass_on(self, source: IO[str], target: IO[str]) -> None:
        for line in source:
            text, told = heard(line.rstrip("\n"))
            if told is not None:
                self.told.update([told])
                if not text:
                    continue
            with self._printing:
                self.last.append(text)
                print(f"{self.name}: {text}", file=target, flush=True)

    def status(self) -> int | None:
        """The exit status as a shell reports it, None while it runs; prints all lines first."""
        status = self._process.poll()
        if status is None:
            return None
        self._hear_out()
        return status if status >= 0 else 128 - status

    def _hear_out(self) -> None:
        if not self._heard_out:
            for pump in self._pumps:
                # A process that it started may keep its streams open for as long as it lives.
                pump.join(1)
        self._heard_out = True

    def tell_of_an_end(self) -> None:
        """Tells the process that another host has failed, so that it doesn't wait for it."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write("\n")
                self._process.stdin.flush()

    def ask_to_end(self) -> None:
        """Closes the process's stdin, which tells a process on any host to end."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def kill(self) -> None:
        """Kills the local process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._hear_out()


def run_together(commands: Sequence[Command]) -> Run:
    """Runs all processes until each has ended well, or until one fails and the others are ended.

    A failure is described on stderr, with the last lines of the host that caused it. SIGTERM ends
    the hosts as Ctrl-C does.
    """
    printing = threading.Lock()
    before = signal.signal(signal.SIGTERM, _interrupt)
    started: list[Started] = []
    try:
        for command in commands:
            started.append(Started(command, printing))
        failed = _first_failure(started)
        if failed is None:
            return Run(0)
        _let_the_others_say_so(started, failed[0])
        _describe(*failed, first=started[0])
        return _failed_run(started, *failed)
    except KeyboardInterrupt:
        print(f"\nends all {len(started)} hosts", file=sys.stderr)
        return Run(_INTERRUPTED)
    finally:
        _end(started)
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _failed_run(started: Sequence[Started], cause: Started, status: int) -> Run:
    told = {what: value for host in reversed(started) for what, value in host.told.items()}
    apart = cause in _blamed(started, apart=True)
    error, repeats = cause.told.get("failed", (_APART if apart else "", False))
    return Run(
        status=status,
        failure=Failure(cause.name, status, error, repeats),
        saved=told.get("saved"),
        sizes=told.get("sizes"),
    )


def _first_failure(started: Sequence[Started]) -> tuple[Started, int] | None:
    """The host that caused a failure and its status, or None if all hosts have ended well."""
    while True:
        statuses = [(host, host.status()) for host in started]
        failed = [(host, status) for host, status in statuses if status]
        if failed:
            return _cause(started, failed[0])
        if all(status == 0 for _, status in statuses):
            return None
        time.sleep(_PAUSE)


def _cause(started: Sequence[Started], first: tuple[Started, int]) -> tuple[Started, int]:
    """The host that caused the other failures, and the status."""
    begun = time.monotonic()
    while True:
        ended = [(host, status) for host in started if (status := host.status()) is not None]
        for host, status in ended:
            if status not in (0, STATUS) and "blames" not in host.told:
                return host, status
        blamed = _blamed(started)
        # A host that is frozen never ends.
        longest = _TO_FOLLOW if blamed else _TO_SAY_SO
        if len(ended) == len(started) or time.monotonic() - begun > longest:
            # Hosts that waited in vain before all were connected can't name the missing host.
            stands = [host for host in started if host.status() is None]
            return (*blamed, *stands, first[0])[0], first[1]
        time.sleep(_PAUSE)


def _let_the_others_say_so(started: Sequence[Started], cause: Started) -> None:
    """Waits for hosts that notice the end of `cause`, and report the newest checkpoint."""
    deadline = time.monotonic() + _TO_SAY_SO
    others = [host for host in started if host is not cause and WATCHES in host.told]
    for host in others:
        host.tell_of_an_end()
    while time.monotonic() < deadline and any(host.status() is None for host in others):
        time.sleep(_PAUSE)


def _blamed(started: Sequence[Started], *, apart: bool | None = None) -> list[Started]:
    """A list with the host that most other hosts blame, or an empty list.

    Args:
        apart: True counts only reports that a host came to a different place, False only reports
            that it is gone, None counts all.
    """
    said = [host.told["blames"] for host in started if "blames" in host.told]
    votes = collections.Counter(peer for peer, kind in said if apart in (None, kind))
    return [started[peer] for peer, _ in votes.most_common(1)]


def _describe(host: Started, status: int, *, first: Started) -> None:
    ended = f"ended with status {status}"
    if host.status() is None:
        ended = "is gone, as the others say"
    elif host.status() == 0:
        ended = "came to its end before the others"
    elif status > 128:
        with contextlib.suppress(ValueError):
            ended = f"ended by {signal.Signals(status - 128).name}"
    if host.told.get("failed", ("",))[0] == HOSTS_DIFFER:
        print(
            f"\n{host.name} {ended}, as all hosts do: they differ, as {first.name} says above.",
            file=sys.stderr,
        )
        return
    print(f"\n{host.name} {ended}, and so all hosts end. Its last lines:", file=sys.stderr)
    for line in host.last:
        print(f"    {line}", file=sys.stderr)


def _end(started: Sequence[Started]) -> None:
    try:
        for host in started:
            host.ask_to_end()
        deadline = time.monotonic() + _TO_END
        while time.monotonic() < deadline and any(host.status() is None for host in started):
            time.sleep(_PAUSE)
    finally:
        # Also after a second Ctrl-C: a process that hangs ends by nothing else.
        for host in started:
            host.kill()
