"""From what was measured to tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from harness.protocol import Failure, Run

LOSS_TOLERANCE = 1e-3
"""Far above what another order of summation costs in fp32 over a few steps, far below what a
missing mean, a wrong shard or other data would cost."""

NOISE = 0.1
"""Spread between rounds, relative to the median, from which the report calls a machine noisy."""

Runs: TypeAlias = Mapping[str, Sequence[Run | Failure]]
"""Candidate name -> what each round gave, the reference candidate first."""


def peer_table(runs: Runs) -> str:
    """Everything measured of each candidate; ratios are to the first candidate's median step."""
    reference = median_step(_good(next(iter(runs.values()))))
    rows = []
    for name, rounds in runs.items():
        good = _good(rounds)
        if not good:
            rows.append([name, "failed", *[""] * 8])
            continue
        step, (low, high) = median_step(good), round_range(good)
        host = [seconds for run in good for seconds in run.host_seconds]
        wire = good[0].wire_bytes
        rows.append(
            [
                name,
                f"{step:.3f}",
                f"{step / reference:.2f}" if reference else "",
                f"{low:.3f} to {high:.3f}",
                f"{1e3 * statistics.median(host):.1f}" if host else "all",
                f"{_median(run.compile_seconds for run in good):.1f}",
                f"{_median(run.init_seconds for run in good):.2f}",
                f"{wire / 1e6:.1f}" if wire is not None else "",
                f"{_median(run.peak_rss for run in good) / 2**20:.0f}",
                f"{good[0].losses[-1]:.5f}",
            ]
        )
    titles = ["", "s/step", "ratio", "rounds", "host ms", "compile s", "init s", "wire MB"]
    return markdown([*titles, "peak MiB", "last loss"], rows)


def series_table(results: Mapping[str, Runs], *, title: str) -> str:
    """Seconds a step of each candidate (row) in each workload (column)."""
    names = list(dict.fromkeys(name for runs in results.values() for name in runs))
    rows = []
    for name in names:
        cells = [median_step(_good(runs.get(name, ()))) for runs in results.values()]
        rows.append([name, *(f"{cell:.3f}" if cell else "failed" for cell in cells)])
    return markdown([title, *results], rows)


def median_step(rounds: Sequence[Run]) -> float | None:
    """Median seconds per step over the timed steps of all rounds, None without one."""
    steps = [seconds for run in rounds for seconds in run.step_seconds]
    return statistics.median(steps) if steps else None


def round_range(rounds: Sequence[Run]) -> tuple[float, float]:
    """The lowest and the highest median of a round."""
    medians = [statistics.median(run.step_seconds) for run in rounds]
    return min(medians), max(medians)


def loss_difference(runs: Runs) -> float:
    """Largest difference between two runs' losses at the same step, NaN if a loss is NaN."""
    good = [run.losses for rounds in runs.values() for run in _good(rounds)]
    spreads = [
        max(losses) - min(losses) if all(loss == loss for loss in losses) else float("nan")
        for losses in zip(*good, strict=True)
    ]
    # max() would drop a NaN.
    return max(spreads, default=0.0) if all(s == s for s in spreads) else float("nan")


def failures(runs: Runs) -> dict[str, str]:
    """Candidate name -> the headline of its first failure."""
    found = {
        name: next((run.headline for run in rounds if isinstance(run, Failure)), None)
        for name, rounds in runs.items()
    }
    return {name: reason for name, reason in found.items() if reason is not None}


def noise_note(runs: Runs) -> str | None:
    """A sentence when rounds of one candidate differ by more than `NOISE`, else None."""
    worst, spread = "", 0.0
    for name, rounds in runs.items():
        good = _good(rounds)
        median = median_step(good)
        if median:
            low, high = round_range(good)
            if (high - low) / median > spread:
                worst, spread = name, (high - low) / median
    if spread <= NOISE:
        return None
    return (
        f"The machine was noisy: the rounds of {worst!r} are {spread:.0%} apart. "
        "Differences of that size between rows mean nothing."
    )


def remarks(runs: Runs) -> list[str]:
    """What a reader of a table must know beside it, and whether the losses agree."""
    difference, note = loss_difference(runs), noise_note(runs)
    lines = [f"Largest difference of a loss at one step: {difference:.1e}."]
    if not difference <= LOSS_TOLERANCE:
        lines.append("**The peers did not do the same work.**")
    lines += [note] if note else []
    lines += [f"{name} failed: `{reason}`" for name, reason in failures(runs).items()]
    return lines


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _good(rounds: Sequence[Run | Failure]) -> list[Run]:
    return [run for run in rounds if isinstance(run, Run)]


def _median(values) -> float:
    return statistics.median(values)
