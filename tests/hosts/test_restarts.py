"""`--restarts` and `--elastic`: what is started again, on which hosts, and what isn't."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations.launcher import _job
from spmdzero.integrations.launcher._again import run_with_restarts
from spmdzero.integrations.launcher._job import Command

NAMES = ["one", "two", "three", "four"]
# What a process tells its launcher, as `spmdzero._to_launcher` writes it.
TELL = """
tell() { printf '\\036spmdzero %s\\n' "$1" >&2; }
fail() { tell "[\\"failed\\", [\\"ValueError: $1\\", ${2:-false}]]"; exit 1; }
saved() { tell '["saved", "/runs/global_step5"]'; }
sizes() { tell "[\\"sizes\\", $1]"; }
# Until the launcher closes its stdin.
stay() { cat > /dev/null; exit 0; }
blames() { tell "[\\"blames\\", [$1, ${2:-false}]]"; exit ${3:-75}; }
"""


class Started:
    """Shells in the place of hosts; takes down which were started.

    Attributes:
        lists: the names of the hosts of each start.
    """

    def __init__(self, line: str) -> None:
        self.line, self.lists = line, []

    def commands(self, names: Sequence[str], restart: int) -> list[Command]:
        self.lists.append(list(names))
        return [
            Command(
                name=name,
                words=["sh", "-c", f"{TELL}\n{self.line}"],
                variables={"HOST": name, "RANK": str(rank), "RESTART": str(restart)},
            )
            for rank, name in enumerate(names)
        ]


def run(
    line: str, *, count: int = 2, restarts: int = 3, elastic: bool = False, by_ssh: bool = False
) -> tuple[int, list[list[str]]]:
    """The status, and the hosts of each start, of a job whose hosts run this line of a shell."""
    started = Started(line)
    status = run_with_restarts(
        started.commands, NAMES[:count], restarts=restarts, elastic=elastic, by_ssh=by_ssh
    )
    return status, started.lists


TWO = NAMES[:2]


def test_a_failure_that_may_pass_is_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    line = "saved; test $RESTART = 2 && exit 0; test $RANK = 1 && fail 'no row 7'; stay"
    assert run(line) == (0, [TWO] * 3)
    said = capsys.readouterr().err
    assert "two ended with status 1" in said
    assert "starts again on one, two (SPMDZERO_RESTART=2, of at most 3)" in said
    assert "the newest checkpoint is /runs/global_step5" in said
    # What is told to the launcher is not shown.
    assert "\x1e" not in said
    assert '["' not in said


CERTAIN = "it would fail again: ValueError: bad key"
APART = "failed twice in the same way, with no new checkpoint between: the hosts came to different"
TWICE = "failed twice in the same way, with no new checkpoint between: ValueError: no row 7"
SPENT = "started again 2 times (--restarts 2)"


@pytest.mark.parametrize(
    ("line", "starts", "reason"),
    [
        pytest.param("fail 'bad key' true", 1, CERTAIN, id="certain"),
        pytest.param("fail 'no row 7'", 2, TWICE, id="twice"),
        pytest.param('fail "no row $RESTART"', 3, SPENT, id="others"),
        pytest.param("saved; fail 'no row 7'", 3, SPENT, id="saves"),
        pytest.param("kill -9 $$", 3, SPENT, id="killed"),
        pytest.param("blames 1 true", 2, APART, id="apart"),
    ],
)
def test_a_failure_that_would_come_again_ends_the_job(
    line: str, starts: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lists = run(f"test $RANK = 0 || stay; {line}", restarts=2)
    assert status in (1, 75, 137)
    assert lists == [TWO] * starts
    assert reason in capsys.readouterr().err


def test_without_restarts_nothing_is_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("exit 3", restarts=0) == (3, [TWO])
    assert "again" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "by_ssh", "lists"),
    [
        # Who says so is not to be mistaken for who is gone.
        ("test $HOST = two && kill -9 $$; sleep 0.2; blames 1", False, [3, 3, "one three"]),
        ("test $HOST = two && stay; blames 1", False, [3, 3, "one three"]),
        # So ends one that waited in vain for another to come.
        ("test $HOST = two && stay; blames 1 false 1", False, [3, 3, "one three"]),
        ("test $HOST = three && exit 255; stay", True, [3, "one two"]),
        ("test $HOST = one && exit 255; stay", True, [3, "two three"]),
        # 255 means nothing where no ssh says it.
        ("test $HOST = three && exit 255; stay", False, [3, 3, "one two"]),
    ],
)  # fmt: skip
def test_an_elastic_job_goes_on_without_a_host_that_is_gone(
    line: str, by_ssh: bool, lists: list[int | str]
) -> None:
    ends = f"test $RESTART = {len(lists) - 1} && exit 0; {line}"
    status, found = run(ends, count=3, elastic=True, by_ssh=by_ssh)
    assert status == 0
    assert found == [NAMES[:3] if names == 3 else str(names).split() for names in lists]


def test_an_elastic_job_goes_on_without_the_host_that_the_others_waited_for_before_they_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_job, "_TO_SAY_SO", 0.5)
    line = "test $RESTART = 2 && exit 0; test $HOST = three && stay; exit 75"
    assert run(line, count=3, elastic=True) == (0, [NAMES[:3], NAMES[:3], TWO])


def test_an_elastic_job_keeps_a_host_whose_script_ends_before_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, lists = run("test $HOST = two && exit 0; blames 1 true", count=3, elastic=True)
    assert (status, lists) == (75, [NAMES[:3]] * 2)
    said = capsys.readouterr().err
    assert "two came to its end before the others, and so all hosts end" in said
    assert APART in said


def test_what_a_script_leaves_running_does_not_keep_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # It holds on to the script's streams, for which the job once waited.
    assert run("setsid sleep 30 & echo $!; exit 0", count=1) == (0, [["one"]])
    left = int(capsys.readouterr().out.split()[-1])
    assert b"sleep" in Path(f"/proc/{left}/cmdline").read_bytes()
    os.kill(left, signal.SIGKILL)


def test_a_torn_line_to_the_launcher_is_printed_and_those_after_it_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "printf '\\036spmdzero [\"saved\", worker 3\\n' >&2; echo after it >&2; exit 0"
    assert run(line, count=1) == (0, [["one"]])
    said = capsys.readouterr().err
    assert "worker 3" in said
    assert "one: after it" in said


def test_an_elastic_job_runs_on_a_number_of_hosts_on_which_its_batch_holds() -> None:
    line = "sizes '[1, 2, 4]'; test $RESTART = 1 && exit 0; test $HOST = two && exit 255; stay"
    assert run(line, count=4, elastic=True, by_ssh=True) == (0, [NAMES, ["one", "three"]])


def test_an_elastic_job_whose_batch_holds_on_no_number_that_is_left_ends() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"2 hosts are left, and the .* holds on 3 only"):
        run(
            "sizes '[3]'; test $HOST = two && exit 255; stay",
            count=3,
            elastic=True,
            by_ssh=True,
        )
