"""What a doctor says: checks of the machine and of what has been trained."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from spmdzero.errors import AuditError
from spmdzero.show import _audit as _render

Status = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: such as ``"versions"`` or ``"host reads"``.
        status: ``"warning"`` slows training down, ``"error"`` keeps it from working.
        said: what was found.
        fix: what to do, "" where there is nothing.
    """

    name: str
    status: Status
    said: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All checks, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """The checks that warn or fail."""
        return tuple(check for check in self.checks if check.status in ("warning", "error"))

    def of(self, name: str) -> tuple[Check, ...]:
        """The checks of one name."""
        return tuple(check for check in self.checks if check.name == name)

    def strict(self) -> None:
        """Does nothing if there is no problem.

        Raises:
            AuditError: there is one; the message is this diagnosis.
        """
        if self.problems:
            raise AuditError(str(self))

    def to_json(self) -> str:
        """The diagnosis as JSON text: an object with this class's attributes."""
        return json.dumps(asdict(self), indent=2)

    @property
    def _headline(self) -> str:
        count = len(self.problems)
        return "no problem" if not count else f"{count} problem{'s' * (count > 1)}"

    def _entries(self) -> list[_render.Entry]:
        return [
            _render.Entry(
                status=check.status,
                title=f"{check.name}: {check.said}",
                lines=(("fix", check.fix),) if check.fix else (),
            )
            for check in self.checks
        ]

    def __str__(self) -> str:
        return _render.text(self._headline, self._entries())

    def _repr_html_(self) -> str:
        return _render.html(self._headline, self._entries())
