"""From the runs of all candidates to the text that is printed."""

import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from harness.worker import Run

LOSS_TOLERANCE = 1e-3
"""In fp32: far above what another order of summation costs over a few tens of steps, far below
what a missing mean, a wrong shard or other data would cost."""

NOISE = 0.1
"""Spread between rounds, relative to the median, from which the report calls a machine noisy."""

Runs = Mapping[str, Sequence[Run]]
"""Candidate name -> one run per round, the reference candidate first."""


def step_table(runs: Runs) -> str:
    """Seconds per step of every candidate as a markdown table; ratios refer to the first."""
    reference = median_step(next(iter(runs.values())))
    rows = []
    for name, rounds in runs.items():
        median = median_step(rounds)
        low, high = _round_range(rounds)
        compiled = statistics.median(run.compile_seconds for run in rounds)
        losses = rounds[0].losses
        rows.append(
            [
                name,
                f"{median:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{median / reference:.2f}",
                f"{compiled:.1f}",
                f"{losses[0]:.5f}",
                f"{losses[-1]:.5f}",
            ]
        )
    titles = ["candidate", "s/step", "medians of rounds", "ratio", "compile s", "first loss"]
    return _markdown([*titles, "last loss"], rows)


def host_table(runs: Runs) -> str:
    """Host and device seconds per step of every candidate as a markdown table."""
    rows = []
    for name, rounds in runs.items():
        host = statistics.median(s for run in rounds for s in run.host_seconds)
        device = statistics.median(s for run in rounds for s in run.device_seconds)
        rows.append([name, f"{host:.3f}", f"{device:.3f}", f"{median_step(rounds):.3f}"])
    return _markdown(["candidate", "host s", "device s", "s/step"], rows)


def median_step(rounds: Sequence[Run]) -> float:
    """Median seconds per step over the timed steps of all rounds."""
    return statistics.median(s for run in rounds for s in run.step_seconds)


def loss_difference(runs: Runs) -> float:
    """Largest difference between two runs' losses at the same step, NaN if a loss is NaN."""
    steps = zip(*(run.losses for rounds in runs.values() for run in rounds), strict=True)
    # max() would drop a NaN.
    spreads = [
        max(losses) - min(losses) if _all_numbers(losses) else float("nan") for losses in steps
    ]
    return max(spreads) if _all_numbers(spreads) else float("nan")


def noise_note(runs: Runs) -> str | None:
    """A sentence when rounds of one candidate differ by more than `NOISE`, else None."""
    worst, spread = "", 0.0
    for name, rounds in runs.items():
        low, high = _round_range(rounds)
        if (high - low) / median_step(rounds) > spread:
            worst, spread = name, (high - low) / median_step(rounds)
    if spread <= NOISE:
        return None
    return (
        f"The machine was noisy: the rounds of {worst!r} are {spread:.0%} apart. "
        "Differences of that size between candidates mean nothing."
    )


def versions() -> str:
    """The packages that decide about time, with their versions."""
    found = []
    for package in ("spmdzero", "torch", "torch_xla", "deepspeed"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def _round_range(rounds: Sequence[Run]) -> tuple[float, float]:
    medians = [statistics.median(run.step_seconds) for run in rounds]
    return min(medians), max(medians)


def _all_numbers(values: Sequence[float]) -> bool:
    return all(value == value for value in values)


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
