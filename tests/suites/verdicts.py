"""What each test of a suite has to say, and what has changed."""

import dataclasses
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import tomllib

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What pytest said of a test.

    Attributes:
        state: "passed", "failed" or "skipped".
        text: of a failure or a skip.
    """

    state: str
    text: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Tests with one verdict.

    Attributes:
        tests: their ids, where `*` stands for any letters.
        verdict: "passes", "differs", "defect" or "not_applicable".
        reason: why it doesn't pass.
        page: the page that documents the difference.
        says: what the failure's text has to contain, so that it fails for that reason.
    """

    tests: list[str]
    verdict: str
    reason: str = ""
    page: str = ""
    says: str = ""


def read(name: str) -> list[Group]:
    """Reads `verdicts/NAME.toml`."""
    told = tomllib.loads((HERE / "verdicts" / f"{name}.toml").read_text())
    groups = [Group(tests=told.pop("passes", []), verdict="passes")]
    for verdict in ("differs", "defect", "not_applicable"):
        groups += [Group(verdict=verdict, **group) for group in told.pop(verdict, [])]
    if told:
        raise ValueError(f"verdicts/{name}.toml: {', '.join(told)} is no verdict")
    return groups


def of(groups: list[Group], test: str) -> Group | None:
    """The group of a test: the one that names it, else the first whose pattern it fits."""
    for group in groups:
        if test in group.tests:
            return group
    for group in groups:
        if any(fits(test, pattern) for pattern in group.tests):
            return group
    return None


def fits(test: str, pattern: str) -> bool:
    """Whether a pattern, in which only `*` is special, stands for a test."""
    return fnmatch.fnmatchcase(test, pattern.replace("[", "[[]"))


def changes(groups: list[Group], outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Says of each test whose verdict isn't that of the table what it has to be and what it is."""
    for test, outcome in sorted(outcomes.items()):
        group = of(groups, test)
        if group is None:
            yield f"{test}: {outcome.state}, and no verdict is written\n{_indented(outcome.text)}"
            continue
        is_right = {
            "passes": outcome.state == "passed",
            "differs": outcome.state == "failed" and group.says in outcome.text,
            "defect": outcome.state == "failed" and group.says in outcome.text,
            "not_applicable": outcome.state == "skipped",
        }[group.verdict]
        if not is_right:
            wanted = f"{group.verdict} ({group.reason})" if group.reason else group.verdict
            if outcome.state == "failed" and group.says not in outcome.text:
                wanted += f", and its failure says {group.says!r}"
            yield f"{test}: {outcome.state}, wanted: {wanted}\n{_indented(outcome.text)}"
    for group in groups:
        for pattern in group.tests:
            if not any(fits(test, pattern) for test in outcomes):
                yield f"{pattern}: {group.verdict}, and there is no such test"


def counts(groups: list[Group], outcomes: dict[str, Outcome]) -> dict[str, int]:
    """How many tests of a run each verdict has."""
    found = dict.fromkeys(("passes", "differs", "defect", "not_applicable"), 0)
    for test in outcomes:
        group = of(groups, test)
        if group is not None:
            found[group.verdict] += 1
    return found


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-12:])
