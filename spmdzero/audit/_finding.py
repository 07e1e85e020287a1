"""What an audit says: findings, each with its cause, its fix and its evidence."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from spmdzero.errors import AuditError
from spmdzero.show import _audit as _render

Name = Literal[
    "stray-activation-collective",
    "wide-dtype",
    "replicated-large-state",
    "parameter-drift",
    "missing-donation",
    "recompilation",
    "cpu-fallback",
    "host-read-in-step",
]
Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with how an engine trains.

    Attributes:
        name: what kind of thing.
        severity: ``"error"`` where ZeRO's memory or communication is lost, ``"warning"`` where
            a step only takes longer.
        subject: the tensor, module or line of code that it is about.
        cause: why it happens.
        fix: what ends it.
        evidence: what the compiled program, the live shards or torch_xla's metrics show.
    """

    name: Name
    severity: Severity
    subject: str
    cause: str
    fix: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The findings of some steps of training.

    Attributes:
        findings: errors first.
        steps: gradient accumulation boundaries that were watched.
        programs: the kinds of program that were read, ``"micro"`` and ``"boundary"``.
    """

    findings: tuple[Finding, ...]
    steps: int
    programs: tuple[str, ...]

    def of(self, name: Name) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(finding for finding in self.findings if finding.name == name)

    def strict(self) -> None:
        """Does nothing if nothing was found.

        Raises:
            AuditError: something was found; the message is this report.
        """
        if self.findings:
            raise AuditError(str(self))

    def to_json(self) -> str:
        """The report as JSON text: an object with this class's attributes."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "AuditReport":
        """The report that `to_json` wrote."""
        found = json.loads(text)
        return cls(
            findings=tuple(Finding(**finding) for finding in found["findings"]),
            steps=found["steps"],
            programs=tuple(found["programs"]),
        )

    @property
    def _headline(self) -> str:
        count = len(self.findings)
        found = "nothing found" if not count else f"{count} finding{'s' * (count > 1)}"
        read = " and ".join(self.programs) or "none"
        return f"audit of {self.steps} steps, programs read: {read}. {found}"

    def _entries(self) -> list[_render.Entry]:
        return [
            _render.Entry(
                status=finding.severity,
                title=f"{finding.name}: {finding.subject}",
                lines=(
                    ("cause", finding.cause),
                    ("fix", finding.fix),
                    ("evidence", finding.evidence),
                ),
            )
            for finding in self.findings
        ]

    def __str__(self) -> str:
        return _render.text(self._headline, self._entries())

    def _repr_html_(self) -> str:
        return _render.html(self._headline, self._entries())


def sorted_findings(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors first, otherwise in the order in which they were found."""
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))
