"""What is wrong with how an engine trains: findings in its programs, its shards and its metrics."""

from spmdzero.audit._audit import Audit, audit, auditing
from spmdzero.audit._diagnosis import Check, Diagnosis
from spmdzero.audit._doctor import doctor
from spmdzero.audit._finding import AuditReport, Finding, sorted_findings
from spmdzero.audit._program import audit_program, stray_collectives

__all__ = [
    "Audit",
    "AuditReport",
    "Check",
    "Diagnosis",
    "Finding",
    "audit",
    "audit_program",
    "auditing",
    "doctor",
    "sorted_findings",
    "stray_collectives",
]
