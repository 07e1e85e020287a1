"""`make test-suites` says which verdict of a client's test has changed."""

from pathlib import Path

import pytest

from tests.suites import sources, verdicts
from tests.suites.verdicts import Group, Outcome

pytestmark = pytest.mark.backends("any")

DOCS = Path(__file__).parents[2]
GROUPS = [
    Group(tests=["t.py::good", "t.py::each[*"], verdict="passes"),
    Group(tests=["t.py::each[4]"], verdict="differs", reason="of ours", says="refused"),
    Group(tests=["t.py::gpu"], verdict="not_applicable", reason="no GPU"),
]
RIGHT = {
    "t.py::good": Outcome("passed", ""),
    "t.py::each[2]": Outcome("passed", ""),
    "t.py::each[4]": Outcome("failed", "4 is refused"),
    "t.py::gpu": Outcome("skipped", "not applicable"),
}
CHANGED = {
    "fails now": ("t.py::good", Outcome("failed", "boom"), "t.py::good: failed, wanted: passes"),
    "passes now": ("t.py::each[4]", Outcome("passed", ""), "wanted: differs (of ours)"),
    "fails otherwise": ("t.py::each[4]", Outcome("failed", "boom"), "its failure says 'refused'"),
    "is skipped now": ("t.py::each[2]", Outcome("skipped", "no GPU"), "skipped, wanted: passes"),
    "is new": ("t.py::new", Outcome("passed", ""), "no verdict is written"),
}


def test_the_verdicts_of_a_table_change_nothing() -> None:
    assert list(verdicts.changes(GROUPS, RIGHT)) == []
    assert verdicts.counts(GROUPS, RIGHT) == {
        "passes": 2, "differs": 1, "defect": 0, "not_applicable": 1
    }  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_verdict_is_said_with_what_it_was(name: str) -> None:
    test, outcome, said = CHANGED[name]
    (change,) = verdicts.changes(GROUPS, RIGHT | {test: outcome})
    assert said in change


def test_a_test_that_is_gone_is_said() -> None:
    left = {test: outcome for test, outcome in RIGHT.items() if test != "t.py::gpu"}
    assert list(verdicts.changes(GROUPS, left)) == [
        "t.py::gpu: not_applicable, and there is no such test"
    ]


@pytest.mark.parametrize("name", sources.names())
def test_a_difference_has_a_reason_and_the_page_that_tells_of_it(name: str) -> None:
    sources.read(name)
    for group in verdicts.read(name):
        assert group.verdict == "passes" or group.reason, group
        assert group.verdict != "differs" or (DOCS / group.page).is_file(), group
