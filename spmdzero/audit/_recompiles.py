"""Findings in the log of compiled programs: programs that were compiled again, and why."""

from collections.abc import Iterable, Iterator

from spmdzero.audit._report import Finding
from spmdzero.engine import Compilation, changed_calls

_SHOWN = 5
_KINDS = {
    "micro": "the program of a micro-batch",
    "boundary": "the program of a step's last micro-batch",
    "captured micro": "the captured program of a micro-batch",
    "captured boundary": "the captured program of a step's last micro-batch",
    "forward": "what Python reads in the forward",
}


def recompilations(
    compilations: Iterable[Compilation], *, before: Iterable[Compilation] = ()
) -> Iterator[Finding]:
    """Yields one finding for each kind of program that was compiled again.

    Args:
        compilations: the compilations to report on, in order.
        before: earlier compilations, which are not reported.
    """
    earlier: dict[str, list[Compilation]] = {}
    for compilation in before:
        earlier.setdefault(compilation.kind, []).append(compilation)
    again: dict[str, list[tuple[Compilation, str]]] = {}
    for compilation in compilations:
        others = earlier.setdefault(compilation.kind, [])
        if others or compilation.known:
            change = _change(compilation, others)
            again.setdefault(compilation.kind, []).append((compilation, change))
        others.append(compilation)
    for kind, found in again.items():
        yield _finding(kind, found)


def _finding(kind: str, found: list[tuple[Compilation, str]]) -> Finding:
    changes = list(dict.fromkeys(change for _, change in found if change))
    steps = ", ".join(str(c.step) for c, _ in found[:_SHOWN]) + (" ..." if found[_SHOWN:] else "")
    programs = sum(c.count for c, _ in found)
    if changes:
        cause = "; ".join(changes[:_SHOWN])
        fix = (
            "give every forward the same shapes and dtypes: pad to one length, or to a few by "
            "spmdzero.data.PadToLengths(loader), drop or pad the last batch, cast before the engine"
        )
    else:
        cause = (
            "the inputs were the same, so the model or the script traced another graph: a Python "
            "number that shapes a tensor, a branch, a tensor that was replaced between steps, "
            "or operations on parameters and states outside of the engine"
        )
        fix = "keep what changes from step to step in tensors, and write into tensors in place"
    return Finding(
        name="recompilation",
        severity="warning",
        subject=_KINDS[kind],
        cause=cause,
        fix=fix,
        evidence=f"{programs} programs compiled again, at step {steps}",
    )


def _change(compilation: Compilation, others: list[Compilation]) -> str:
    """How the calls differ from those of the most similar earlier compilation."""
    if compilation.known:
        return ""
    found = [changed_calls(other.calls, compilation.calls) for other in others]
    return min((f for f in found if f), key=len, default="")
