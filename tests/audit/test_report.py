"""A report as JSON and as an error, and what `auditing` refuses."""

import json

import pytest

import spmdzero
from spmdzero.audit import AuditReport, Finding
from tests.audit.models import Sound, batches, config, engine_of

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

FINDING = Finding(
    name="parameter-drift", severity="error", subject="w", cause="c", fix="f", evidence="e"
)
REPORT = AuditReport(findings=(FINDING,) * 2, steps=3, programs=("boundary",))
CLEAN = AuditReport(findings=(), steps=3, programs=("micro", "boundary"))


def test_json_is_read_back() -> None:
    assert json.loads(REPORT.to_json())["findings"][0]["name"] == "parameter-drift"
    assert AuditReport.from_json(REPORT.to_json()) == REPORT


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
