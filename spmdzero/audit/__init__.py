"""Finds faults in an engine's training: in its programs, its shards and its metrics."""

from spmdzero.audit._audit import Audit, audit, auditing
from spmdzero.audit._collectives import ReadProgram
from spmdzero.audit._doctor import doctor
from spmdzero.audit._report import AuditReport, Check, Diagnosis, Finding, sorted_findings

__all__ = [
    "Audit",
    "AuditReport",
    "Check",
    "Diagnosis",
    "Finding",
    "ReadProgram",
    "audit",
    "auditing",
    "doctor",
    "sorted_findings",
]
