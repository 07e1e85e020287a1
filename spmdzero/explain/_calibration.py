"""Corrects the estimated time of a step by steps that were measured on real chips.

The estimate is a sum over classes of operations. Each class has a factor that is the same on all
generations, and each generation has one for the whole: `time = generation x sum(factor x class)`.
All factors are fitted to the measured steps at once, as logarithms, and drawn towards 1: where the
rows say nothing of a class, the estimate stays as it is. So no factor is negative.
"""

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spmdzero.errors import SpmdZeroUsageError

CLASSES = ("products", "memory", "kernels", "wire", "hidden", "host")
"""What a step's time is divided into, see `StepTime.classes`."""
By = Literal["others", "siblings", "other generations"]
SHIPPED = Path(__file__).with_name("calibration.json")
OWN = "measured by yourself"
"""The source of steps that `spmdzero calibrate --add` added."""
FAR_OFF = 4.0
"""How many times its estimate a measured step may take to be taken for the same step."""
LEVEL = 0.8
"""The share of steps that are to lie within their intervals."""
SHORTEST = 0.01
"""Seconds of an estimate below which no time is calibrated.

What starts a program counts there, of which steps of seconds tell nothing.
"""
# How far each logarithm is expected to be from 0, by which the fit weighs them: a measured step's
# from its fit, a class's factor, a generation's.
_NOISE, _CLASS, _GENERATION = 0.08, 0.25, 0.15
# What is hidden by the model's count is not all hidden on a chip: this share of it is expected to
# be waited for.
_PRIOR = {"hidden": 0.1}
_ROUNDS = 50
# How far off estimates are without a calibration, as a logarithm: measured steps took 0.65 to 1.44
# times their estimate.
_UNKNOWN = 0.4


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step that was measured on real chips, beside its estimate.

    Attributes:
        name: the model, the number of chips, and what else tells it from others.
        generation: ``v5e``, ...
        devices: number of devices, as in `Topology.devices`.
        seconds: measured, of one step.
        classes: the estimate, seconds of each of `CLASSES`.
        group: rows of one group are one model on one generation, with other options.
        source: where the figure was published, or who measured it.
    """

    name: str
    generation: str
    devices: int
    seconds: float
    classes: Mapping[str, float]
    group: str
    source: str

    @property
    def raw(self) -> float:
        """The estimate before calibration."""
        return raw_seconds(self.classes)


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The time of a step on the scale of measured steps.

    Attributes:
        seconds: of one step.
        low, high: the interval in which `LEVEL` of the left-out measured steps lie.
        rows: number of measured steps of this generation.
        rows_in_all: number of measured steps of all generations.
        note: what makes it less certain, "" if nothing is known.
    """

    seconds: float
    low: float
    high: float
    rows: int
    rows_in_all: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors that were fitted to measured steps.

    Attributes:
        factors: of each of `CLASSES`.
        generations: the factor of each generation that has measured steps.
        spread: half of the interval's width, as a logarithm.
        rows: the measured steps.
    """

    factors: Mapping[str, float]
    generations: Mapping[str, float]
    spread: float
    rows: tuple[MeasuredStep, ...] = field(repr=False)

    def seconds(self, classes: Mapping[str, float], generation: str) -> float:
        """The calibrated time; a generation without rows counts as if its factor were 1."""
        whole = self.generations.get(generation, 1.0)
        return whole * sum(self.factors[name] * classes.get(name, 0.0) for name in CLASSES)

    def of(self, classes: Mapping[str, float], generation: str) -> Calibrated | None:
        """The calibrated time with its interval.

        None if the generation has no measured step, or the estimate is below `SHORTEST`.
        """
        own = [row for row in self.rows if row.generation == generation]
        if not own or raw_seconds(classes) < SHORTEST:
            return None
        seconds = self.seconds(classes, generation)
        return Calibrated(
            seconds=seconds,
            low=seconds * math.exp(-self.spread),
            high=seconds * math.exp(self.spread),
            rows=len(own),
            rows_in_all=len(self.rows),
            note=self._note(classes, own),
        )

    def _note(self, classes: Mapping[str, float], own: Sequence[MeasuredStep]) -> str:
        raw, shortest = raw_seconds(classes), min(row.raw for row in own)
        if raw < shortest / 2:
            return f"shorter than any measured step, of which the shortest is {shortest:.3g} s"
        return ""


def raw_seconds(classes: Mapping[str, float]) -> float:
    """The estimate before calibration: what is hidden takes no time."""
    return sum(classes.get(name, 0.0) for name in CLASSES if name != "hidden")


def fit(rows: Iterable[MeasuredStep], *, spread: bool = True) -> Calibration:
    """The calibration by these measured steps.

    Args:
        rows: the measured steps.
        spread: whether to judge the fit by leaving rows out, which takes as many fits as rows.
    """
    rows = tuple(rows)
    factors, generations = _fitted(rows)
    errors = _errors(rows) if spread else []
    return Calibration(factors=factors, generations=generations, spread=quantile(errors), rows=rows)


def _errors(rows: Sequence[MeasuredStep]) -> list[float]:
    """The largest error of each group of rows that is left out, as a logarithm.

    One of each group, since many rows of one model don't tell how far off a new model is. So a
    group that is all of its generation doesn't count.
    """
    found: dict[tuple[str, str], float] = {}
    groups = {(row.group, row.generation) for row in rows}
    for row, seconds in left_out(rows):
        of, off = (row.group, row.generation), abs(math.log(row.seconds / seconds))
        if sum(generation == row.generation for _, generation in groups) > 1:
            found[of] = max(off, found.get(of, 0.0))
    return list(found.values())


def left_out(rows: Sequence[MeasuredStep]) -> Iterator[tuple[MeasuredStep, float]]:
    """Yields each row with its time by a fit to others, see `_others`."""
    for row in rows:
        others, _ = _others(rows, row)
        yield row, fit(others, spread=False).seconds(row.classes, row.generation)


def _others(rows: Sequence[MeasuredStep], row: MeasuredStep) -> tuple[list[MeasuredStep], By]:
    """The rows by which one is judged, and what they are to it.

    All rows of its group are left out with it, which would tell too much of it, unless they are
    all that its generation has. If it is the only one of its generation, others judge it.
    """
    strangers = [r for r in rows if (r.group, r.generation) != (row.group, row.generation)]
    others = [r for r in rows if r is not row]
    if any(r.generation == row.generation for r in strangers):
        return strangers, "others"
    if any(r.generation == row.generation for r in others):
        return others, "siblings"
    return others, "other generations"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A measured step beside its time by a calibration that doesn't know it.

    Attributes:
        row: the step.
        seconds, low, high: by a fit to the others.
        by: what the others are: rows of other groups (``"others"``); its siblings among them, as
            its generation has no other (``"siblings"``); none of its generation (``"other
            generations"``), as it has no other.
    """

    row: MeasuredStep
    seconds: float
    low: float
    high: float
    by: By

    @property
    def within(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low <= self.row.seconds <= self.high


def judged(rows: Sequence[MeasuredStep]) -> list[Judged]:
    """Each row by a fit that doesn't know it, with the interval that the others give."""
    found = []
    for row in rows:
        others, by = _others(rows, row)
        told = fit(others)
        seconds, wide = told.seconds(row.classes, row.generation), math.exp(told.spread)
        found.append(
            Judged(row=row, seconds=seconds, low=seconds / wide, high=seconds * wide, by=by)
        )
    return found


def quantile(errors: Sequence[float]) -> float:
    """The half-width that a new error stays within, with the probability `LEVEL` at least.

    It is the error of rank (n + 1) x `LEVEL` among n (conformal prediction). Of fewer errors than
    that takes it is the largest, and at least as much as estimates are off without a calibration.
    """
    ordered = sorted(abs(error) for error in errors)
    rank = math.ceil((len(ordered) + 1) * LEVEL)
    return ordered[rank - 1] if rank <= len(ordered) else max([*ordered, _UNKNOWN])


def _fitted(rows: Sequence[MeasuredStep]) -> tuple[dict[str, float], dict[str, float]]:
    """The most likely factors: Gauss-Newton on the logarithms of times and factors."""
    generations = tuple(dict.fromkeys(row.generation for row in rows))
    if not rows:
        return {name: _PRIOR.get(name, 1.0) for name in CLASSES}, {}
    seconds = np.array([[row.classes.get(name, 0.0) for name in CLASSES] for row in rows])
    measured = np.log([row.seconds for row in rows])
    which = np.array([[row.generation == name for name in generations] for row in rows], float)
    expected = np.array(
        [math.log(_PRIOR.get(name, 1.0)) for name in CLASSES] + [0.0] * len(generations)
    )
    wide = np.array([_CLASS] * len(CLASSES) + [_GENERATION] * len(generations))
    found = expected.copy()
    for _ in range(_ROUNDS):
        parts = seconds * np.exp(found[: len(CLASSES)])
        whole = parts.sum(1)
        misses = measured - np.log(whole) - which @ found[len(CLASSES) :]
        slopes = np.hstack([parts / whole[:, None], which])
        # A row of each prior stands beside the measured ones.
        left = np.vstack([slopes / _NOISE, np.diag(1 / wide)])
        right = np.concatenate([misses / _NOISE, (expected - found) / wide])
        change = np.linalg.lstsq(left, right, rcond=None)[0]
        found = found + change
        if np.abs(change).max() < 1e-9:
            break
    factors = np.exp(found)
    own = factors[len(CLASSES) :]
    return (
        {name: float(factor) for name, factor in zip(CLASSES, factors, strict=False)},
        {name: float(factor) for name, factor in zip(generations, own, strict=True)},
    )


def own_file() -> Path:
    """Where steps that were measured on one's own slices are kept."""
    told = os.environ.get("SPMDZERO_CALIBRATION")
    if told:
        return Path(told)
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home, "spmdzero", "calibration.json")


def current() -> Calibration:
    """The calibration in use: one's own file's if there is one, else the package's."""
    path = own_file()
    path = path if path.is_file() else SHIPPED
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, _written: int) -> Calibration:
    return read(path)


def read(path: Path) -> Calibration:
    """The calibration of a file.

    Raises:
        SpmdZeroUsageError: the file is no calibration.
    """
    try:
        found = json.loads(path.read_text())
        rows = tuple(MeasuredStep(**row) for row in found["rows"])
        return Calibration(
            factors={name: float(found["factors"][name]) for name in CLASSES},
            generations={str(k): float(v) for k, v in found["generations"].items()},
            spread=float(found["spread"]),
            rows=rows,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as wrong:
        raise SpmdZeroUsageError(
            f"{path} is no calibration ({wrong!r}): `spmdzero calibrate --add` writes one anew "
            "once it is moved away"
        ) from wrong


def write(found: Calibration, path: Path) -> None:
    """Writes the calibration to a file that `read` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_as_json(found), indent=1) + "\n")


def _as_json(found: Calibration) -> dict[str, Any]:
    return {
        "factors": {name: round(found.factors[name], 4) for name in CLASSES},
        "generations": {name: round(factor, 4) for name, factor in found.generations.items()},
        "spread": round(found.spread, 4),
        "rows": [_row_as_json(row) for row in found.rows],
    }


def _row_as_json(row: MeasuredStep) -> dict[str, Any]:
    return {
        "name": row.name,
        "generation": row.generation,
        "devices": row.devices,
        "seconds": row.seconds,
        "classes": {name: float(f"{row.classes.get(name, 0.0):.5g}") for name in CLASSES},
        "group": row.group,
        "source": row.source,
    }


def calibrated(classes: Mapping[str, float], generation: str) -> Calibrated | None:
    """The time of a step on the scale of measured steps, with its interval.

    Args:
        classes: the estimate, seconds of each of `CLASSES`, as `StepTime.classes` has them; what is
            left out counts as 0.
        generation: ``v5e``, ...

    Returns:
        None if no step of the generation was measured, or the estimate is below 10 ms.

    Raises:
        SpmdZeroUsageError: one's own file of measured steps can't be read.
    """
    return current().of(classes, generation)
