"""Skips the tests of a client that aren't applicable, and writes outcomes: a plugin of pytest."""

import fnmatch
import json
import os
from pathlib import Path

import pytest

_found: dict[str, list[str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    left_out = json.loads(os.environ["SUITE_LEFT_OUT"])
    for item in items:
        if _fits(item.nodeid, left_out):
            item.add_marker(pytest.mark.skip(reason="not applicable"))


def _fits(test: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in patterns)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed", report.longreprtext)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before, _ = _found.get(report.nodeid, ("passed", ""))
    if report.skipped and hasattr(report, "wasxfail"):
        # Whether the client expects it to fail is nothing to the verdict.
        _write(report.nodeid, "failed", report.longreprtext)
    elif report.skipped:
        _write(report.nodeid, "skipped", str(report.longrepr))
    elif report.failed:
        _write(report.nodeid, "failed", report.longreprtext)
    elif report.when == "call" and before == "passed":
        _write(report.nodeid, "passed", "")


def _write(test: str, state: str, text: str) -> None:
    # At once: a test may end the process.
    _found[test] = [state, text]
    Path(os.environ["SUITE_OUTCOMES"]).write_text(json.dumps(_found))
