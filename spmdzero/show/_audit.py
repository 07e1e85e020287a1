"""Pages of audits and diagnoses."""

from spmdzero._display import page_of
from spmdzero.audit import AuditReport, Diagnosis
from spmdzero.show._page import Entries, Entry, Page


@page_of.register
def audit_page(report: AuditReport) -> Page:
    """A page with each finding, its cause, its fix and its evidence."""
    return Page((findings(report),))


@page_of.register
def diagnosis_page(diagnosis: Diagnosis) -> Page:
    """A page with each check and its fix, if there is one."""
    entries = [
        Entry(
            status=check.status,
            title=f"{check.name}: {check.said}",
            said={"fix": check.fix} if check.fix else {},
        )
        for check in diagnosis.checks
    ]
    found = _counted(len(diagnosis.problems), "problem") or "no problem"
    return Page((Entries(headline=[found], entries=entries),))


def findings(report: AuditReport, *, below: str = "") -> Entries:
    """The findings of a report as entries; `below` is a line under them."""
    found = _counted(len(report.findings), "finding") or "nothing found"
    read = " and ".join(report.programs) or "none"
    if report.steps:
        headline = f"audit of {report.steps} steps, programs read: {read}. {found}"
    elif report.programs:
        headline = f"programs read: {read}. {found}"
    else:
        headline = "Nothing was audited: no step was trained, and there is no program to read."
    return Entries(
        headline=[headline],
        entries=[
            Entry(
                status=finding.severity,
                title=f"{finding.name}: {finding.subject}",
                said={"cause": finding.cause, "fix": finding.fix, "evidence": finding.evidence},
            )
            for finding in report.findings
        ],
        notes=[below] if below else [],
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}" if count else ""
