"""The reports of an audit and of the doctor."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from spmdzero._display import Shown
from spmdzero.errors import AuditError

Name = Literal[
    "stray-activation-collective",
    "gathered-over-sequence",
    "gathered-over-tensor",
    "wide-dtype",
    "replicated-large-state",
    "parameter-drift",
    "missing-donation",
    "recompilation",
    "cpu-fallback",
    "host-read-in-step",
    "loss-scale",
    "world-size-of-hosts",
]
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault in an engine's training.

    Attributes:
        name: the kind of fault.
        severity: ``"error"`` if ZeRO's saving of memory or communication is lost, or a number
            depends on the number of devices; ``"warning"`` if a step only takes longer.
        subject: the tensor, module or line of code that has the fault.
        cause: why it happens.
        fix: how to remove it.
        evidence: proof from the compiled program, the live shards or the backend's metrics.
    """

    name: Name
    severity: Literal["error", "warning"]
    subject: str
    cause: str
    fix: str
    evidence: str


class _Report(Shown):
    """A report that can be printed, checked and written as JSON."""

    @property
    def problems(self) -> tuple[object, ...]:
        """The faults in the report."""
        raise NotImplementedError

    def strict(self) -> None:
        """Does nothing if there is no problem.

        Raises:
            AuditError: there is a problem; the message is this report.
        """
        if self.problems:
            raise AuditError(str(self))

    def to_json(self) -> str:
        """The report as JSON text: an object with this class's attributes."""
        return json.dumps(asdict(self), indent=2)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class AuditReport(_Report):
    """The findings of some steps of training.

    Attributes:
        findings: the findings, errors first.
        steps: number of watched gradient accumulation boundaries.
        programs: the kinds of program that were read, ``"micro"`` and ``"boundary"``.
    """

    findings: tuple[Finding, ...]
    steps: int
    programs: tuple[str, ...]

    def of(self, name: Name) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(finding for finding in self.findings if finding.name == name)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings."""
        return self.findings

    @classmethod
    def from_json(cls, text: str) -> "AuditReport":
        """The report that `to_json` wrote."""
        found = json.loads(text)
        findings = tuple(Finding(**finding) for finding in found["findings"])
        return cls(findings=findings, steps=found["steps"], programs=tuple(found["programs"]))


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check of the doctor.

    Attributes:
        name: a name such as ``"versions"`` or ``"host reads"``.
        status: ``"warning"`` slows training down, ``"error"`` keeps it from working.
        said: the finding.
        fix: what to do, "" if nothing has to be done.
    """

    name: str
    status: Literal["ok", "note", "warning", "error"]
    said: str
    fix: str = ""

    @classmethod
    def fine_unless(
        cls,
        wrong: object,
        name: str,
        said: str,
        *,
        fix: str,
        status: Literal["note", "warning"] = "warning",
    ) -> "Check":
        """An ``ok`` check without a fix; if `wrong` is true, a check with `status` and `fix`."""
        if wrong:
            return cls(name=name, status=status, said=said, fix=fix)
        return cls(name=name, status="ok", said=said)


@dataclass(frozen=True, kw_only=True)
class Diagnosis(_Report):
    """All checks, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """The checks that warn or fail."""
        return tuple(check for check in self.checks if check.status in ("warning", "error"))

    def of(self, name: str) -> tuple[Check, ...]:
        """The checks named `name`."""
        return tuple(check for check in self.checks if check.name == name)


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, errors first, otherwise in the order in which they were found."""
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))


def first_of(names: Iterable[str]) -> str:
    """The first few of the sorted names, as a finding's subject lists them."""
    found = sorted(names)
    return ", ".join(found[:_SHOWN]) + (" ..." if len(found) > _SHOWN else "")
