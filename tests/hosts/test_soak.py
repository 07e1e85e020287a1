"""Trains for a while on changing numbers of hosts, of which one is killed or freezes, or all are.

`make soak-hosts` (30 minutes), or `python -m tests.hosts.test_soak --minutes 3`. What each start
does, and the undisturbed run that its losses are compared with, are those of the soak of one host.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spmdzero.backend.hosts import processes
from tests.checkpoint.test_soak import (
    RESTS,
    TOLERANCE,
    compared,
    largest_difference,
    notes_in,
    report,
    saved_step,
    steps_in,
)
from tests.hosts.hosts import Host, hosts

# Hosts and the devices of each.
SHAPES = ((1, 8), (2, 4), (4, 2), (8, 1), (2, 2), (4, 1), (2, 1))
KINDS = ("one is killed", "one freezes", "all are killed", "one is interrupted")
# Whoever has not ended by then hangs: a frozen host is given up after 10 seconds.
LONGEST = 120


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Starts and disturbs until the time is over; returns both loss curves and what happened.

    Raises:
        AssertionError: a host failed by itself or hung, or resumed behind a complete checkpoint.
    """
    draw, end = random.Random(seed), time.monotonic() + minutes * 60
    happened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name, "run"), Path(name, "log")
        while time.monotonic() < end:
            count, devices = draw.choice(SHAPES)
            kind = draw.choice(KINDS)
            expected, known = saved_step(folder), len(notes_in(log))
            words = (
                "--work", folder, log, 10**9, minutes * 60 / 4000, draw.randrange(3),
                draw.choice(RESTS),
            )  # fmt: skip
            with hosts(
                "tests.checkpoint.test_soak", *map(str, words), count=count, devices=devices
            ) as started:
                early = time.monotonic() + draw.uniform(1, 5) if draw.random() < 0.15 else None
                while not steps_in(notes_in(log)[known:]):
                    assert all(host.process.poll() is None for host in started), said(started)
                    if early is not None and time.monotonic() > early:
                        break
                    time.sleep(0.2)
                time.sleep(draw.uniform(0, max(2, minutes / 2)))
                disturb(started, kind, draw)
            happened[kind] += 1
            print(f"{sum(happened.values())}: {count} hosts, {devices} devices each: {kind}")
            for note in notes_in(log)[known:]:
                assert note.get("resumed", expected) >= expected, "it lost a complete checkpoint"
        return {**compared(Path(name), log, sum(happened.values())), "happened": happened}


def disturb(started: list[Host], kind: str, draw: random.Random) -> None:
    """Does it to one host, or to all, and waits until the others have ended with their status."""
    alive = [host.process.poll() for host in started]
    assert alive == [None] * len(started), f"{alive}: {said(started)}"
    victim = draw.choice(started)
    if kind == "all are killed":
        for host in started:
            os.kill(host.process.pid, signal.SIGKILL)
        for host in started:
            assert host.wait(LONGEST) == -signal.SIGKILL
        return
    sent = {"one freezes": signal.SIGSTOP, "one is interrupted": signal.SIGINT}
    os.kill(victim.process.pid, sent.get(kind, signal.SIGKILL))
    if kind == "one is interrupted":
        interrupt(victim)
    for host in started:
        if host is victim:
            continue
        try:
            status = host.wait(LONGEST)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"host {host.rank} hangs: {said(started)}") from None
        # One that never met the others ends with an error of its own.
        assert status in (1, processes.STATUS), f"{status}: {said(started)}"
        assert status == processes.STATUS or "has not met the others" in host.said()[1]


def interrupt(host: Host) -> None:
    """Until it ends: Python drops a KeyboardInterrupt that comes in a callback of its collector."""
    end = time.monotonic() + LONGEST
    while host.process.poll() is None:
        assert time.monotonic() < end, f"it doesn't end: {host.said()[1][-2000:]}"
        time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(host.process.pid, signal.SIGINT)


def said(started: list[Host]) -> str:
    return "\n".join(f"--- {host.rank}: {host.said()[1][-2000:]}" for host in started)


@pytest.mark.slow
def test_a_run_on_changing_numbers_of_hosts_has_the_losses_of_one_that_nothing_happens_to() -> None:
    found = soak(minutes=3, seed=1)
    assert found["kills"] >= 3
    assert found["undisturbed"], "no step was reached"
    assert largest_difference(found) < TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("out/hosts.png"))
    given = parser.parse_args()
    found = soak(given.minutes, given.seed)
    print(dict(found["happened"]))
    report(found, given.plot)


if __name__ == "__main__":
    main()
