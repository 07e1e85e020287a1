"""Fits the calibration of estimated times to the steps of tests/data/measured_steps.json.

`make calibration` runs it: it writes spmdzero/explain/calibration.json, and the table of
docs/explain.md, in which each row is judged by a fit that doesn't know it.
"""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmdzero.explain._calibration import (
    CLASSES,
    LEVEL,
    SHIPPED,
    Calibration,
    fit,
    judged,
    read,
    write,
)
from tests.support.measured_steps import measured_steps, not_compiled

_MARKS = {"others": "", "siblings": " \\*", "other generations": " \\*\\*"}
PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
TABLE = re.compile(r"(?<=<!-- make calibration -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def main() -> None:
    """Fits, writes, and prints the table."""
    write(fit(measured_steps()), SHIPPED)
    text = "\n".join(lines(read(SHIPPED))) + "\n"
    PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text()))
    print(text)


def lines(found: Calibration) -> Iterator[str]:
    """The table of docs/explain.md, and what it comes to."""
    yield "| step | chip | measured s | estimated s | calibrated s | interval | within |"
    yield "|---|---|---:|---:|---:|---:|---|"
    every = judged(found.rows)
    for each in every:
        row = each.row
        name = row.name + _MARKS[each.by]
        yield (
            f"| {name} | {row.generation} | {_short(row.seconds)} | {_short(row.raw)} | "
            f"{_short(each.seconds)} | {_short(each.low)} to {_short(each.high)} | "
            f"{'yes' if each.within else 'no'} |"
        )
    inside = sum(each.within for each in every)
    raw = [each.row.raw / each.row.seconds for each in every]
    own = [each.seconds / each.row.seconds for each in every]
    yield ""
    yield (
        f"{inside} of {len(every)} measured steps lie within the interval that the others give, "
        f"{100 * inside / len(every):.0f} %, where {100 * LEVEL:.0f} % should. The estimate is "
        f"{_range(raw)} of what was measured, the calibrated time {_range(own)}; in the middle "
        f"they are {_middle(raw)} and {_middle(own)} off."
    )
    yield ""
    yield (
        "A row with \\* is judged by rows of the same program too, as its generation has no other: "
        "they tell much of it. A row with \\*\\* is the only one of its generation, and judged by "
        "other generations. The errors of both count for no interval."
    )
    left = not_compiled()
    if left:
        yield ""
        yield f"Published and not compiled yet, so that they tell nothing here: {'; '.join(left)}."
    yield ""
    yield "| class | factor | generation | factor |"
    yield "|---|---:|---|---:|"
    generations = list(found.generations.items())
    for i in range(max(len(CLASSES), len(generations))):
        left = f"{CLASSES[i]} | {found.factors[CLASSES[i]]:.2f}" if i < len(CLASSES) else " | "
        right = f"{generations[i][0]} | {generations[i][1]:.2f}" if i < len(generations) else " | "
        yield f"| {left} | {right} |"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _middle(ratios: Sequence[float]) -> str:
    off = statistics.median(abs(math.log(ratio)) for ratio in ratios)
    return f"{100 * math.expm1(off):.0f} %"


def _short(seconds: float) -> str:
    return f"{seconds:.4g}" if seconds < 1000 else f"{seconds:.0f}"


if __name__ == "__main__":
    main()
