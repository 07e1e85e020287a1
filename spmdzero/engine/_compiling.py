"""Notices a loop that compiles at every step, and names what differs each time."""

import logging
import re
from collections.abc import Callable

from spmdzero.backend import programs

# The first steps compile too: once without states, and again while their traces are compared.
_STEPS = 6
# The number of the latest of these steps whose programs are compared.
_COMPARED = 2
# Some versions of XLA write a % before names in the text, others don't.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (\S+) ([\w-]+)\(([^%)]*).*", re.MULTILINE)
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_NAME = re.compile(r"(%?\b[A-Za-z_][\w-]*)\.\d+")
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_LIBRARY = re.compile(r".*/site-packages/")
_SLICES = ("slice", "dynamic-slice", "gather")
logger = logging.getLogger("spmdzero")


class CompilingSteps:
    """Counts the steps that compiled something; warns once if many in a row did.

    Attributes:
        steps: number of steps that compiled something, including the first ones.
        in_a_row: number of the latest steps in a row that did.
        said: the warning, or None before it was given.
    """

    def __init__(self) -> None:
        self.steps = self.in_a_row = 0
        self.said: str | None = None
        self._texts: list[str] = []
        self._records = False

    def look(self, text: Callable[[], str]) -> None:
        """Records the program that is about to be compiled, if programs are to be compared."""
        if self._records:
            self._texts.append(text())

    def step_ended(self, *, own: int, elsewhere: int, change: str) -> None:
        """Takes note of a step.

        Args:
            own: number of programs compiled for the engine's own launches.
            elsewhere: number of programs compiled for the script between them.
            change: how the inputs differ from those of the step before, "" if they don't.
        """
        compiled = own + elsewhere
        self.steps += bool(compiled)
        self.in_a_row = self.in_a_row + 1 if compiled else 0
        if self.said is None and self.in_a_row == _STEPS:
            self.said = self._message(own, change)
            logger.warning("%s", self.said)
        self._record(self.said is None and self.in_a_row >= _STEPS - _COMPARED)

    def _record(self, wanted: bool) -> None:
        if wanted != self._records:
            self._records = wanted
            programs.record_scopes(wanted, by=self)
        if not wanted:
            self._texts = []

    def _message(self, own: int, change: str) -> str:
        if change:
            cause = (
                f"{change}. Give each step the same shapes and dtypes, or a few: pad, cast before "
                "the engine, drop_last"
            )
        elif not own:
            cause = (
                "the forward, or the script between the engine's calls, reads values that are "
                "computed by another program each time. Compute them on the CPU, or read them "
                "after the step; spmdzero.auditing(engine) names the lines that read"
            )
        else:
            cause = difference(*self._texts[-2:]) if len(self._texts) >= _COMPARED else _UNKNOWN
        return (
            f"each of the last {_STEPS} steps compiled a program, which takes far longer than "
            f"running it: {cause}. engine.doctor() counts them"
        )


_UNKNOWN = (
    "the same inputs give another graph each time. Keep what changes from step to step in tensors, "
    "not in Python numbers or branches"
)
_SAME = (
    "the same operations are compiled again. Either fewer programs are kept than the loop "
    "uses (XLA_COMPILATION_CACHE_SIZE), or a parameter or state is replaced by a new tensor each "
    "time: write into it in place"
)


def difference(before: str, after: str) -> str:
    """A message: where the second of two programs differs from the first, and what to do.

    Args:
        before, after: HLO as text, with the Python line of each operation.
    """
    known = [_stripped(line) for line in before.splitlines()]
    lines = after.splitlines()
    changed = [
        (old, line) for old, line in zip(known, lines, strict=False) if old != _stripped(line)
    ]
    found = [(old, line) for old, line in changed if _INSTRUCTION.match(line)]
    if not found:
        return _SAME if len(known) == len(lines) else _UNKNOWN
    # A slice or a number is the cause; values computed from it differ by shape only.
    old, new = next(((o, n) for o, n in found if _operation(n) in (*_SLICES, "constant")), found[0])
    at = f" at {_place(new)}" if _SOURCE.search(new) else ""
    was, now = (_attributes(line) for line in (old, new))
    what = f"{_operation(new)} of {_shape(new)}{at} is another each time ({was}, then {now})"
    if _operation(new) in _SLICES:
        return (
            f"{what}. Each index or slice of a tensor on the devices is a program of its own: keep "
            "the data set on the CPU, from where the engine uploads each batch, or index with a "
            "tensor (x.index_select(0, indices))"
        )
    return f"{what}. {_UNKNOWN[0].upper()}{_UNKNOWN[1:]}"


def _stripped(line: str) -> str:
    return _METADATA.sub("", _NAME.sub(r"\1", line))


def _operation(line: str) -> str:
    found = _INSTRUCTION.match(line)
    return found[2] if found else ""


def _shape(line: str) -> str:
    """The shape of an operation's result; of a slice, the shape of its operand."""
    found = re.search(r"\((\S+) %?" if _operation(line) in _SLICES else r" = (\S+) ", line)
    return found[1].split("{")[0] if found else "a tensor"


def _attributes(line: str) -> str:
    """The attributes that distinguish an operation from others of its kind: bounds, or value."""
    if "constant(" in line:
        return line.split("constant(")[1].split(")")[0]
    return ", ".join(re.findall(r"\w+=\{?\[?[^=]*?\}(?=,|$)", _stripped(line))) or "other operands"


def _place(line: str) -> str:
    found = _SOURCE.search(line)
    assert found is not None
    return f"{_LIBRARY.sub('', found[1])}:{found[2]}"
