"""From what was measured to tables."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from harness.processes import ProcessFailedError
from harness.protocol import Run

LOSS_TOLERANCE = 1e-3
"""Far above what another order of summation costs in fp32 over a few steps, far below what a
missing mean, a wrong shard or other data would cost."""

NOISE = 0.1
"""Spread between rounds, relative to the median, from which the report calls a machine noisy."""

Runs: TypeAlias = Mapping[str, Sequence[Run | ProcessFailedError]]
"""Candidate name -> what each round gave, the reference candidate first."""


def peer_table(runs: Runs) -> str:
    """Everything measured of each candidate; ratios are to the first candidate's median step."""
    titles = ["s/step", "ratio", "rounds", "host ms", "compile s", "init s", "wire MB"]

    def cells(good: Sequence[Run]) -> list[str]:
        wire = good[0].wire_bytes
        return [
            *_steps(runs, good, lambda seconds: f"{seconds:.3f}"),
            _host_ms(good) or "all",
            f"{statistics.median(run.compile_seconds for run in good):.1f}",
            f"{statistics.median(run.init_seconds for run in good):.2f}",
            f"{wire / 1e6:.1f}" if wire is not None else "",
            f"{statistics.median(run.peak_rss for run in good) / 2**20:.0f}",
            f"{good[0].losses[-1]:.5f}",
        ]

    return _table(runs, [*titles, "peak MiB", "last loss"], cells)


def gpu_table(runs: Runs) -> str:
    """What a GPU took; ratios are to the first candidate's median step."""
    titles = ["ms/step", "ratio", "rounds", "host ms", "unread ms", "compile s", "init s"]

    def cells(good: Sequence[Run]) -> list[str]:
        unread = [run.unread_seconds for run in good if run.unread_seconds is not None]
        memory = [run.peak_memory for run in good if run.peak_memory is not None]
        return [
            *_steps(runs, good, lambda seconds: f"{1e3 * seconds:.2f}"),
            _host_ms(good),
            f"{1e3 * statistics.median(unread):.2f}" if unread else "",
            f"{statistics.median(run.compile_seconds for run in good):.1f}",
            f"{statistics.median(run.init_seconds for run in good):.1f}",
            f"{max(memory) / 2**20:.0f}" if memory else "",
            f"{good[0].losses[-1]:.5f}",
        ]

    return _table(runs, [*titles, "peak GPU MiB", "last loss"], cells)


def _table(runs: Runs, titles: Sequence[str], cells: Callable[[Sequence[Run]], list[str]]) -> str:
    """A row of `cells` for each candidate, or that all its rounds failed."""
    goods = {name: _good(rounds) for name, rounds in runs.items()}
    failed = ["failed", *[""] * (len(titles) - 1)]
    rows = [[name, *(cells(good) if good else failed)] for name, good in goods.items()]
    return markdown(["", *titles], rows)


def _steps(runs: Runs, good: Sequence[Run], said: Callable[[float], str]) -> list[str]:
    """The median step, its ratio to the first candidate's, and the medians of the rounds."""
    step, reference = median_step(good), median_step(_good(next(iter(runs.values()))))
    assert step is not None
    ratio = f"{step / reference:.2f}" if reference else ""
    return [said(step), ratio, " to ".join(map(said, round_range(good)))]


def _host_ms(good: Sequence[Run]) -> str:
    host = [seconds for run in good for seconds in run.host_seconds]
    return f"{1e3 * statistics.median(host):.1f}" if host else ""


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
    # Unlike max(), torch keeps a NaN.
    losses = torch.tensor(good, dtype=torch.float64)
    return (losses.amax(0) - losses.amin(0)).max().item() if good else 0.0


def noise_note(runs: Runs) -> str | None:
    """A sentence when rounds of one candidate differ by more than `NOISE`, else None."""
    spreads = {}
    for name, good in ((name, _good(rounds)) for name, rounds in runs.items()):
        if median := median_step(good):
            low, high = round_range(good)
            spreads[name] = (high - low) / median
    worst = max(spreads, key=lambda name: spreads[name], default=None)
    if worst is None or spreads[worst] <= NOISE:
        return None
    return (
        f"The machine was noisy: the rounds of {worst!r} are {spreads[worst]:.0%} apart. "
        "Differences of that size between rows mean nothing."
    )


def remarks(runs: Runs, *, tolerance: float = LOSS_TOLERANCE) -> list[str]:
    """What a reader of a table must know beside it, and whether the losses agree."""
    difference, note = loss_difference(runs), noise_note(runs)
    lines = [f"Largest difference of a loss at one step: {difference:.1e}."]
    if not difference <= tolerance:
        lines.append("**The peers did not do the same work.**")
    lines += [note] if note else []
    for name, rounds in runs.items():
        failed = [run for run in rounds if isinstance(run, ProcessFailedError)]
        lines += [f"{name} failed: `{run.headline}`" for run in failed[:1]]
    return lines


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _good(rounds: Sequence[Run | ProcessFailedError]) -> list[Run]:
    return [run for run in rounds if isinstance(run, Run)]
