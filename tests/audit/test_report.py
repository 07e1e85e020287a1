"""A report as text, JSON and HTML, and as an error."""

import json
from html.parser import HTMLParser

import pytest

import spmdzero
from spmdzero.audit import AuditReport, Finding
from tests.audit.models import Sound, batches, config, engine_of

FINDINGS = (
    Finding(
        name="parameter-drift", severity="error", subject="w[0] <b>",
        cause="c", fix="f", evidence="[8, 4] of [64, 4]",
    ),
    Finding(
        name="recompilation", severity="warning", subject="s",
        cause="why " * 60, fix="f", evidence="e",
    ),
)  # fmt: skip
REPORT = AuditReport(findings=FINDINGS, steps=3, programs=("boundary",))
CLEAN = AuditReport(findings=(), steps=3, programs=("micro", "boundary"))


def test_text_has_each_finding_with_cause_fix_and_evidence() -> None:
    text = str(REPORT)
    assert text.startswith("audit of 3 steps, programs read: boundary. 2 findings")
    assert "parameter-drift: w[0] <b>" in text
    assert "[8, 4] of [64, 4]" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\x1b" not in text
    assert str(CLEAN) == "audit of 3 steps, programs read: micro and boundary. nothing found"


def test_json_is_read_back() -> None:
    assert json.loads(REPORT.to_json())["findings"][0]["name"] == "parameter-drift"
    assert AuditReport.from_json(REPORT.to_json()) == REPORT


def test_html_escapes_needs_nothing_from_outside_and_closes_every_tag() -> None:
    html = REPORT._repr_html_()
    assert "w[0] &lt;b&gt;" in html
    assert not any(part in html for part in ("http", "<script", "<link", "src="))
    open_tags: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Balance().feed(html)
    assert open_tags == []


def test_html_sets_no_text_colour_that_one_theme_would_hide() -> None:
    text = REPORT._repr_html_()
    for colour in ("black", "white", "#000", "#fff", "background:#"):
        assert colour not in text


def test_strict_raises_the_report_only_if_something_was_found() -> None:
    CLEAN.strict()
    with pytest.raises(spmdzero.AuditError, match="2 findings"):
        REPORT.strict()


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    return engine_of(Sound(), config(gas=2))


class TestUse:
    def test_batches_that_make_no_whole_step_are_refused(self, engine: spmdzero.Engine) -> None:
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="3 micro-batches, a step takes 2"):
            engine.audit(batches(3))

    def test_a_block_without_a_step_is_refused(self, engine: spmdzero.Engine) -> None:
        with (
            pytest.raises(spmdzero.SpmdZeroUsageError, match="saw no step"),
            spmdzero.auditing(engine),
        ):
            pass

    def test_the_report_waits_for_the_end_of_the_block(self, engine: spmdzero.Engine) -> None:
        with spmdzero.auditing(engine) as audit:
            engine.train_batch(iter(batches(2)))
            with pytest.raises(spmdzero.SpmdZeroUsageError, match="not over"):
                _ = audit.report
        assert audit.report.programs == ("micro", "boundary")
