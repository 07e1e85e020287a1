"""`spmdzero calibrate`: steps that were measured, by which estimated times are corrected."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spmdzero.cli._explain import duration
from spmdzero.errors import SpmdZeroUsageError

if TYPE_CHECKING:
    from spmdzero.explain._calibration import Calibration, MeasuredStep


def calibrate(
    add: Annotated[
        Path | None,
        typer.Option(help="what `spmdzero explain --json` wrote of the step that was measured"),
    ] = None,
    took: Annotated[
        str | None, typer.Option(help="how long a step took, such as 3.44s or 850ms")
    ] = None,
    tpu: Annotated[
        str | None, typer.Option(help="where, if the explanation is for several --tpu")
    ] = None,
    name: Annotated[str, typer.Option(help="what to call the step")] = "",
    remove: Annotated[
        str | None, typer.Option(help="the name of a step of one's own to forget")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="where to keep it: SPMDZERO_CALIBRATION, or ~/.config/spmdzero/calibration.json, "
            "if left out. `explain` reads these two."
        ),
    ] = None,
) -> None:
    """Shows the measured steps behind calibrated times, and adds one that you measured."""
    # Checked before torch is imported, which takes seconds.
    if (add is None) != (took is None):
        raise SpmdZeroUsageError(
            "--add names the explanation of a step and --took says how long it took: both, such as "
            "--add explanation.json --took 3.44s"
        )
    from spmdzero.explain import _calibration as of

    path = file or of.own_file()
    known = path if path.is_file() else of.SHIPPED
    found = of.read(known)
    if add is None and remove is None:
        typer.echo("\n".join(_lines(found, known)))
        return
    rows = list(found.rows)
    if remove is not None:
        rows = [row for row in rows if row.name != remove or row.source != of.OWN]
        if len(rows) == len(found.rows):
            own = ", ".join(row.name for row in rows if row.source == of.OWN) or "none"
            raise SpmdZeroUsageError(f"--remove {remove!r}: your own measured steps are: {own}")
    if add is not None and took is not None:
        row = _measured(add, duration(took), tpu, name)
        # The same step again replaces what was measured before.
        rows = [r for r in rows if (r.name, r.source) != (row.name, row.source)] + [row]
    of.write(of.fit(rows), path)
    typer.echo("\n".join(_lines(of.read(path), path)))


def _measured(explained: Path, seconds: float, tpu: str | None, name: str) -> "MeasuredStep":
    from spmdzero.explain import Explanation, Topology
    from spmdzero.explain import _calibration as of

    try:
        text = explained.read_text()
    except OSError as error:
        raise SpmdZeroUsageError(f"--add {explained}: {error.strerror}") from error
    explanation = Explanation.from_json(text)
    targets = [time.target for time in explanation.times]
    if not targets or (tpu is None and len(targets) > 1):
        known = ", ".join(targets) or "none, as no --tpu was named, or the step doesn't fit"
        raise SpmdZeroUsageError(
            f"--add {explained}: a step's time on one TPU is needed, and it has: {known}. "
            "Name one by --tpu"
        )
    time = explanation.time_on(tpu or targets[0])
    topology = Topology.parse(time.target)
    if not time.seconds or abs(math.log(seconds / time.seconds)) > math.log(of.FAR_OFF):
        raise SpmdZeroUsageError(
            f"--took {seconds:g}s: the estimate of this step is {time.seconds:.3g} s. More than "
            f"{of.FAR_OFF} times off, it is not the same step: compare model, batch, chips and "
            "config, and measure some steps after the first two"
        )
    return of.MeasuredStep(
        name=name or f"{explanation.model} on {time.target}",
        generation=topology.chip.name,
        devices=topology.devices,
        seconds=seconds,
        classes=time.classes,
        group=name or explanation.model,
        source=of.OWN,
    )


def _lines(found: "Calibration", path: Path) -> Iterator[str]:
    from spmdzero.explain import CHIPS
    from spmdzero.explain import _calibration as of
    from spmdzero.show import Table

    judged = of.judged(found.rows)
    table = Table(
        headers=("step", "chip", "measured s", "estimated s", "calibrated s, left out", "within"),
        rows=[
            (
                j.row.name,
                j.row.generation,
                f"{j.row.seconds:.3g}",
                f"{j.row.raw:.3g}",
                f"{j.seconds:.3g} ({j.low:.3g} to {j.high:.3g})",
                "yes" if j.within else "no",
            )
            for j in judged
        ],
        numbers=[2, 3, 4],
    )
    yield table.text()
    yield ""
    inside = sum(j.within for j in judged)
    yield f"{inside} of {len(judged)} measured steps lie within the interval that the others give"
    yield "factors: " + ", ".join(f"{n} {f:.2f}" for n, f in found.factors.items())
    yield "of a generation: " + ", ".join(f"{n} {f:.2f}" for n, f in found.generations.items())
    missing = [name for name in CHIPS if name not in found.generations]
    if missing:
        yield f"no measured step: {', '.join(missing)}; their times stay as they are estimated"
    yield f"kept in {path}"
