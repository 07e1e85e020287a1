"""Corrects the estimate of candidates by those that were compiled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spmdzero.search._knobs import Candidate
from spmdzero.search._rough import Rough

# A compiled candidate counts for so much less in an estimate for each knob that differs.
_FADES = 0.25
_LATE = 100.0
# How much the mean of all that was compiled counts beside the nearest: an estimate that is too low
# for one is expected to be so for all.
_ALL = 0.02


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A compiled candidate beside its rough estimate.

    Attributes:
        candidate, rough: what was compiled.
        seconds: of a step, by the compiler; None if it didn't fit.
        peak: bytes of a device, by the compiler.
    """

    candidate: Candidate
    rough: Rough
    seconds: float | None
    peak: int


def predicted(
    candidate: Candidate,
    rough: Rough,
    seen: Sequence[Seen],
    *,
    refused: Sequence[Candidate] = (),
) -> Rough:
    """The rough figures, corrected by the ratios that compiled candidates have to theirs.

    The nearest count most, and all a little. A ratio is a mean of logarithms, so that twice and
    half are as far. What is like a candidate that was refused is expected to be slow: it is late.
    """
    rests = [
        (each, math.log(max(each.peak - each.rough.states, 1) / max(each.rough.rest, 1.0)))
        for each in seen
        if each.peak
    ]
    times = [
        (each, math.log(each.seconds / each.rough.seconds))
        for each in seen
        if each.seconds is not None
    ]
    late = 1.0 + sum(_LATE * _FADES ** _distance(candidate, each) for each in refused)
    return Rough(
        states=rough.states,
        rest=rough.rest * math.exp(_near(candidate, rests)),
        seconds=rough.seconds * math.exp(_near(candidate, times)) * late,
    )


def _near(candidate: Candidate, ratios: Sequence[tuple[Seen, float]]) -> float:
    """The mean of ratios of compiled candidates, weighted by how near they are to `candidate`."""
    if not ratios:
        return 0.0
    near = [_FADES ** _distance(candidate, each.candidate) for each, _ in ratios]
    weights = [weight + _ALL / len(ratios) for weight in near]
    return sum(w * ratio for w, (_, ratio) in zip(weights, ratios, strict=True)) / sum(weights)


def _distance(one: Candidate, other: Candidate) -> float:
    """Number of knobs that differ; sizes by how often one is twice the other."""
    far = 0.0
    for name in one.changes_from(other):
        a, b = getattr(one, name), getattr(other, name)
        if name == "accumulation":
            # It follows from the rows.
            continue
        number = isinstance(a, int) and not isinstance(a, bool) and name not in ("stage", "kept")
        far += 0.5 * abs(math.log2(a / b)) if number else 1.0
    return far
