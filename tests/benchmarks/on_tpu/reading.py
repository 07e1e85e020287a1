"""Figures of the steps that were compiled."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from on_tpu import folder
from spmdzero.explain import StepTime, Topology, step_time
from spmdzero.explain._aot import needed_by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """One row of one table.

    Attributes:
        row: its name.
        problem: why there are no figures, "" where there are.
        time: of a step, None with a problem.
        peak: bytes of one chip that are in use at once, what it needs where it doesn't fit.
        compiled: the date and libtpu's version.
        compile_seconds: of the compiler, on the machine that compiled.
        mfu: the model's arithmetic over what the chip could do in that time.
    """

    row: str
    problem: str = ""
    time: StepTime | None = None
    peak: int | None = None
    compiled: str = ""
    compile_seconds: float = 0.0
    mfu: float = 0.0

    @property
    def kinds(self) -> Mapping[str, float]:
        """Seconds by kind of operation."""
        assert self.time is not None
        return {share.name or "": share.seconds for share in self.time.kinds}


def read(root: Path, row: Mapping[str, Any], *, flops: float) -> Figures:
    """The figures of a row that was prepared.

    Args:
        root: of the folder.
        row: as `folder.row_of` has it.
        flops: the model's arithmetic, see `work.model_flops`.
    """
    name = row["row"]
    if "failed" in row:
        return Figures(row=name, problem=f"could not be traced: {row['failed']}")
    results = [folder.result_of(root, digest) for digest in row["programs"]]
    made = [result for result in results if result is not None]
    if not made or len(made) < len(results):
        return Figures(row=name, problem="not compiled yet")
    seconds = sum(result["seconds"] for result in made)
    failed = [result["failed"] for result in made if "failed" in result]
    if failed:
        return Figures(row=name, problem=failed[0], compile_seconds=seconds)
    exhausted = [result["exhausted"] for result in made if "exhausted" in result]
    if exhausted:
        return Figures(row=name, problem=_too_large(exhausted[0]), compile_seconds=seconds)
    chips = Topology.parse(row["topology"])
    programs = [(folder.hlo_of(root, digest), 1) for digest in row["programs"]]
    time = step_time(programs, chips.chip, target=chips.name)
    return Figures(
        row=name,
        time=time,
        peak=max(result["peak"] for result in made),
        compiled=f"{made[-1].get('date', '')} {made[-1].get('libtpu', '')}",
        compile_seconds=seconds,
        mfu=flops / (time.seconds * chips.chip.bf16_flops),
    )


def _too_large(said: str) -> str:
    needed = needed_by(said)
    return "doesn't fit" if needed is None else f"doesn't fit: {needed / 2**30:.2f} GiB"
