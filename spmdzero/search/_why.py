"""Says in words what a step waits for, and why one way to train is quicker than another."""

from collections.abc import Iterator, Sequence

from spmdzero.explain import StepTime
from spmdzero.plan import sized
from spmdzero.search._funnel import Found, Trial
from spmdzero.search._knobs import Candidate

_NAMES = {"wire": "the wire", "host": "host memory", "other": "other operations"}
# A kind of operation is named from this share of a step on.
_SHARE = 0.03
_MOST = 3


def waits_for(time: StepTime) -> str:
    """Names the kinds of operations that take most of a step, with their shares."""
    kinds = sorted(time.kinds, key=lambda kind: -kind.seconds)
    said = [
        f"{_NAMES.get(str(kind.name), kind.name)} {100 * kind.seconds / time.seconds:.0f} %"
        for kind in kinds
        if kind.seconds > _SHARE * time.seconds
    ]
    return ", ".join(said[:_MOST])


def reasons(found: Found) -> Iterator[str]:
    """Yields why the best is better than the next one, and than the user's own JSON."""
    ranked = found.ranked
    if not ranked:
        return
    best = ranked[0]
    if len(ranked) > 1:
        yield f"Than the next: {_beside(best, ranked[1])}"
    own = next((t for t in found.trials if t.candidate == found.own), None)
    if own is None or own is (ranked[1] if len(ranked) > 1 else None):
        return
    if own.candidate == best.candidate:
        yield "Your JSON says what is best of all that was looked at."
    elif own.refused:
        yield f"Your JSON, with defaults for what it doesn't say, can't be: {own.refused}"
    elif not own.fits:
        yield f"Your JSON, with defaults for what it doesn't say, doesn't fit: {sized(own.peak)}"
    else:
        yield f"Than your JSON: {_beside(best, own)}"


def _beside(best: Trial, other: Trial) -> str:
    assert best.seconds is not None
    assert other.seconds is not None
    line = (
        f"{other.seconds / best.seconds:.2f} times as fast, {1e3 * best.seconds:,.2f} instead of "
        f"{1e3 * other.seconds:,.2f} ms, by {_changes(best.candidate, other.candidate)}"
    )
    kinds = list(_kinds(best, other))
    return f"{line}; {', '.join(kinds)}." if kinds else f"{line}."


def _changes(best: Candidate, other: Candidate) -> str:
    names = best.changes_from(other)
    # The number of micro-batches follows from their rows.
    if "rows" in names and "accumulation" in names:
        names.remove("accumulation")
    said = [f"{name} = {_value(best, name)} (not {_value(other, name)})" for name in names]
    return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)


def _value(candidate: Candidate, name: str) -> str:
    value = getattr(candidate, name)
    return ", ".join(value) or "nothing" if isinstance(value, tuple) else str(value)


def _kinds(best: Trial, other: Trial) -> Iterator[str]:
    """Yields the kinds of operations whose time differs most."""
    if best.explanation is None or other.explanation is None:
        return
    ours, theirs = best.explanation.times[0], other.explanation.times[0]
    before = {kind.name: kind.seconds for kind in theirs.kinds}
    moved = [(kind.name, kind.seconds - before.get(kind.name, 0.0)) for kind in ours.kinds]
    for name, change in sorted(moved, key=lambda pair: -abs(pair[1]))[:2]:
        if abs(change) > _SHARE * ours.seconds:
            less = "less" if change < 0 else "more"
            yield f"{1e3 * abs(change):,.2f} ms {less} of {_NAMES.get(str(name), name)}"


def funnel_lines(found: Found, *, seconds: float) -> Sequence[str]:
    """Tells what was looked at, in lines."""
    made = [trial for trial in found.trials if not trial.refused]
    lines = [
        f"{found.ways:,} ways to train, {found.fitting:,} of which fit by the plan's bytes; "
        f"{len(made)} compiled in {seconds:,.0f} s. It ended because {found.stopped}."
    ]
    lines += found.notes
    for reason, candidate in found.refused.items():
        lines.append(f"Left out, such as {candidate.words()}: {reason}")
    return lines
