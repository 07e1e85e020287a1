"""The result of a search: a table, the reason, the JSON to use, and the proof."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from spmdzero._document import Document
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain import Calibrated, Explanation


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train, as the compiler saw it.

    Attributes:
        words: its knobs in a line.
        keys: dotted key of the JSON -> value.
        yours: whether it is what the user's own JSON says.
        seconds: of a step, by the compiler; None if it doesn't fit.
        calibrated: the time on the scale of measured steps, with its interval; None where it isn't
            known, see `StepTime.calibrated`.
        peak: bytes of a device.
        room: bytes that a device has.
        fits: whether the peak is within it.
        rate: tokens (or rows) per second and chip.
        mfu, hfu: shares of the chip's peak, see `StepTime`; None where they aren't known.
        waits: what the step waits for, in words.
        per_million: the price of a million tokens, in the unit that the price was given in.
        of_run: the price of the whole run.
        run_seconds: the time of the whole run.
        refused: why the config can't be, "" if it can.
    """

    words: str
    keys: Mapping[str, Any]
    yours: bool = False
    seconds: float | None = None
    calibrated: Calibrated | None = None
    peak: int = 0
    room: int = 0
    fits: bool = False
    rate: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    waits: str = ""
    per_million: float | None = None
    of_run: float | None = None
    run_seconds: float | None = None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Document):
    """The best way that was found to train a model on a slice.

    Attributes:
        slice: ``v6e:2x4``, ...
        model: the model's class and size, in words.
        step: the rows and tokens of a step, in words.
        counted: ``"token"`` or ``"row"``: what rates count.
        ways: what was compiled: what fits, the quickest first, then the others.
        why: sentences: why the best is better than the next, and than the user's own JSON.
        config: the JSON to use; {} if nothing fits.
        reasons: dotted key of `config` that was searched -> what it says.
        launch: lines of a shell that start the training on the slice.
        explanation: of the best: its ledger, peak and time; None if nothing fits.
        funnel: what was looked at, and why the search ended, in lines.
        larger: where nothing fits, the smallest slice of the generation where something may; "" if
            there is none.
        notes: how the JSON was read.
    """

    _named: ClassVar[str] = "a training plan"

    slice: str
    model: str
    step: str
    counted: str
    ways: tuple[Way, ...]
    why: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    launch: tuple[str, ...] = ()
    explanation: Explanation | None = None
    funnel: tuple[str, ...] = ()
    larger: str = ""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Way | None:
        """The quickest way that fits; None if none does."""
        return next((way for way in self.ways if way.fits), None)

    @property
    def yours(self) -> Way | None:
        """The user's own JSON; None if it was refused before it could be compiled."""
        return next((way for way in self.ways if way.yours), None)

    def commented(self) -> str:
        """The JSON to use, with a comment at each key that was searched.

        spmdzero and DeepSpeed read comments; the file that `write` writes has none, as transformers
        reads none.
        """
        if not self.config:
            return ""
        lines, path = [], list[str]()
        for line in json.dumps(self.config, indent=2).splitlines():
            depth = (len(line) - len(line.lstrip())) // 2
            name = line.strip().partition('": ')[0].removeprefix('"') if '": ' in line else ""
            path = [*path[: max(depth - 1, 0)], name]
            why = self.reasons.get(".".join(path[:depth])) if name else None
            lines.append(f"{line}  // {why}" if why else line)
        return "\n".join(lines)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON to use into a file.

        Raises:
            SpmdZeroUsageError: nothing fits, so there is none.
        """
        if not self.config:
            raise SpmdZeroUsageError(
                f"nothing fits {self.slice}, so there is no JSON to write"
                + (f": something may fit {self.larger}" if self.larger else "")
            )
        Path(path).write_text(json.dumps(self.config, indent=2) + "\n")
