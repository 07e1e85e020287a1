"""The estimate beside what others measured on real chips."""

import statistics
from collections.abc import Iterator, Sequence

from harness.report import markdown

from on_tpu.cases import CALIBRATION, MEASURED_8B, ROWS
from on_tpu.reading import Figures

GOAL = CALIBRATION["measured-maxtext"].calibrates or 0.0
"""MaxText's own seconds a step."""


def lines(found: Sequence[Figures], ours: Figures | None) -> Iterator[str]:
    """A table of estimates beside measurements, and ours on the same scale."""
    rows, ratios = [], []
    for figures in found:
        row = CALIBRATION[figures.row]
        measured = row.calibrates or 0.0
        if figures.time is None:
            rows.append([row.title, f"{measured:.3f}", figures.problem, ""])
            continue
        ratio = measured / figures.time.seconds
        ratios.append(ratio)
        estimate = f"{figures.time.seconds:.3f}"
        rows.append([row.title, f"{measured:.3f}", estimate, f"{ratio:.2f}"])
    yield (
        "\nWhat others measured of this step on 8 chips of v6e, by the progress file of MinText,\n"
        "a public repository (Llama 3.2's 1 B, 4 rows of 2,048 tokens a chip, ZeRO-3), beside the\n"
        "estimate of such a step, written by hand in JAX for this page. Only who wrote a step\n"
        "tells MaxText's rows from the ones above them: here they are one program.\n"
    )
    yield markdown(["", "measured s", "estimated s", "measured / estimated"], rows)
    if not ratios:
        return
    scale = statistics.median(ratios)
    low, high = min(ratios), max(ratios)
    yield (
        f"\nA real step takes {low:.2f} to {high:.2f} times its estimate, {scale:.2f} in the "
        "middle: differences between rows that are\nsmaller than that spread mean nothing."
    )
    if ours is not None and ours.time is not None:
        told = [f"{s * ours.time.seconds:.3f}" for s in (low, scale, high)]
        yield (
            f"spmdzero's {ours.time.seconds:.3f} s (row {ROWS[ours.row].title!r}) would be "
            f"{told[1]} s on that scale\n({told[0]} to {told[2]}), beside MaxText's {GOAL:.3f} s."
        )


def of_8b(found: Sequence[Figures], ours: Figures | None) -> Iterator[str]:
    """Ours beside what MaxText measured of the 8 B, on the scale of a step written as its."""
    by_hand = next((f for f in found if f.row == "jax-qkv"), None)
    if by_hand is None or by_hand.time is None or ours is None or ours.time is None:
        return
    scale = MEASURED_8B / by_hand.time.seconds
    yield (
        f"\nMaxText trains this on 8 chips of v6e, as many tokens a step, in {MEASURED_8B} s, with "
        "the projections of\nattention kept in the host's memory, as the last row has it. So "
        f"measured, that row takes {scale:.2f} times its\nestimate, and spmdzero's "
        f"{ours.time.seconds:.3f} s would be {scale * ours.time.seconds:.3f} s."
    )
