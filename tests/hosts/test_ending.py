"""A host that dies, fails or freezes ends the others: with its name, and a status of their own."""

import re
import signal
from pathlib import Path

import pytest

from spmdzero.backend.hosts import processes
from tests.hosts.hosts import hosts

# Who waits for a runtime's own barrier takes minutes; a loaded machine starts slowly.
SECONDS = 90
WAYS = {
    "killed": (-signal.SIGKILL, "is gone: its connection"),
    "raises": (1, "is gone: it failed: ValueError: row 7 has no label"),
    "freezes": (None, "is gone: it gave no sign of life for 4 s"),
    "exits": (None, "came to its end, and host"),
}
TRAINING = "training on x [2, 24], y [2, 24]"
# Way -> what the host came to, and where the others came to.
APART = {
    "hands over other rows": ("evaluation on x [1, 24], y [1, 24]", TRAINING),
    "saves": ("a comparison of all hosts", TRAINING),
    # The others compute the loss with the rest of the step, as one program.
    "reads alone": ("a program with", "a program with"),
}


# An error that is said, and a host that says nothing; the rest takes long.
QUICK = {("raises", 1), ("freezes", 1)}


@pytest.mark.parametrize(
    ("way", "host"),
    [
        pytest.param(way, host, marks=() if (way, host) in QUICK else pytest.mark.slow)
        for way in WAYS
        for host in (0, 1)
    ],
)
def test_the_others_end_and_name_it_and_the_newest_checkpoint(
    way: str, host: int, tmp_path: Path
) -> None:
    own, reason = WAYS[way]
    arguments = (way, str(host), str(tmp_path), "4")
    # More than one other, where that matters: they hear of it by the store of the first.
    count = 3 if way == "killed" else 2
    with hosts("tests.hosts.ending", *arguments, count=count, devices=1) as started:
        ending = started[host]
        for other in started:
            if other is ending:
                continue
            assert other.wait(SECONDS) == processes.STATUS, other.said()
            out, errors = other.said()
            assert "saved" in out
            assert f"spmdzero: host {host} (" in errors
            assert reason in errors
            assert f"The newest complete checkpoint is {tmp_path}/global_step5" in errors
        if own is not None:
            assert ending.wait(SECONDS) == own
        if way == "raises":
            assert "ValueError: row 7 has no label" in ending.said()[1]


@pytest.mark.parametrize("way", APART)
def test_hosts_that_wait_for_each_other_in_different_places_end(way: str, tmp_path: Path) -> None:
    with hosts("tests.hosts.ending", way, "1", str(tmp_path), "4", count=2, devices=1) as both:
        for host in both:
            assert host.wait(SECONDS) == processes.STATUS, host.said()
            errors = host.said()[1]
            assert all(place in errors for place in APART[way])
            assert "they never meet" in errors
            # Where each of them is in its own code.
            found = re.search(r"to .+ \((\S+):\d+\), host . to .+ \((\S+):\d+\): they", errors)
            assert found is not None, errors
            assert {Path(file).name for file in found.groups()} == {"ending.py", "training.py"}
            assert "`if rank == 0: print(loss.item())`" in errors
