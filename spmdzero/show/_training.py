"""Pages of training plans: the best way, what it was compared with, the JSON, the proof."""

import textwrap
from collections.abc import Iterator, Sequence

from spmdzero._display import page_of
from spmdzero.plan import sized
from spmdzero.search import TrainingPlan, Way
from spmdzero.show._explanation import explanation_parts
from spmdzero.show._page import About, Folded, Heading, InHtml, Lines, Page, Part, Table, Verbatim
from spmdzero.show._time import and_calibrated

_DAY = 86_400
_REFUSED = 90  # characters


@page_of.register
def training_page(plan: TrainingPlan) -> Page:
    """A page of one slice."""
    return plans_together([plan])


def plans_together(plans: Sequence[TrainingPlan], *, told: Sequence[tuple[str, str]] = ()) -> Page:
    """A page of several slices, which begins with a table of them.

    Args:
        plans: one of each slice.
        told: facts that only the command knows, as name and text: the HTML begins with them.
    """
    slices = ", ".join(plan.slice for plan in plans)
    parts: list[Part] = [About("spmdzero plan", [*told, ("model", plans[0].model)])]
    if len(plans) > 1:
        parts += [Heading("Which slice?"), _slices(plans)]
    for plan in plans:
        parts += _parts(plan)
    return Page(tuple(parts), title=f"spmdzero plan: {slices}")


def _parts(plan: TrainingPlan) -> Iterator[Part]:
    yield Heading(f"On {plan.slice}")
    yield Lines((_headline(plan), f"{plan.model}; a step has {plan.step}", *plan.notes))
    if plan.ways:
        yield _ways(plan)
    if plan.why:
        yield Lines(plan.why)
    yield Lines(plan.funnel)
    if plan.config:
        yield Heading("The JSON to use")
        yield Verbatim(plan.commented())
        yield Heading("How to start it")
        yield Verbatim("\n".join(plan.launch))
    if plan.explanation is not None:
        proof = tuple(explanation_parts(plan.explanation))
        yield InHtml(Folded(f"The proof: the compiled program on {plan.slice}", proof))


def _headline(plan: TrainingPlan) -> str:
    best = plan.best
    if best is None:
        larger = f" Something may fit {plan.larger}: --tpu {plan.larger}." if plan.larger else ""
        return f"Nothing that was compiled fits {plan.slice}.{larger}"
    said = [f"Best on {plan.slice}: {best.words}", _seconds(best, of=" a step")]
    if best.mfu is not None:
        said.append(f"MFU {100 * best.mfu:.1f} %")
    if best.run_seconds is not None:
        price = "" if best.of_run is None else f", price {best.of_run:,.2f}"
        said.append(f"the run takes {_days(best.run_seconds)}{price}")
    return ". ".join(said) + "."


def _ways(plan: TrainingPlan) -> Table:
    priced = any(way.per_million is not None for way in plan.ways)
    headers = ["", "way", "of the memory", "ms a step", f"{plan.counted}s/s a chip", "MFU", "HFU",
               "waits for", *(["price a million"] if priced else [])]  # fmt: skip
    rows = []
    for place, way in enumerate(plan.ways):
        mark = "best" if place == 0 and way.fits else ""
        mark = ", ".join(filter(None, [mark, "yours" if way.yours else ""]))
        rows.append([mark, way.words, *_cells(way), *([_price(way)] if priced else [])])
    notes = ["times, rates and prices are by libtpu's own estimate"]
    if any(way.calibrated is not None for way in plan.ways):
        notes.append("calibrated: on the scale of steps that were measured, with its interval")
    return Table(headers=headers, rows=rows, numbers=range(2, 7), notes=notes)


def _cells(way: Way) -> list[str]:
    if way.refused:
        return ["", "", "", "", "", f"refused: {textwrap.shorten(way.refused, _REFUSED)}"]
    share = f"{100 * way.peak / way.room:.0f} %" if way.room else ""
    if not way.fits:
        return [share, "", "", "", "", f"doesn't fit: {sized(way.peak)} of {sized(way.room)}"]
    return [share, _seconds(way), f"{way.rate:,.0f}", _percent(way.mfu), _percent(way.hfu),
            way.waits]  # fmt: skip


def _seconds(way: Way, *, of: str = "") -> str:
    assert way.seconds is not None
    said = f"{1e3 * way.seconds:,.2f} ms{of}"
    return and_calibrated(said, way.calibrated)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _price(way: Way) -> str:
    return "" if way.per_million is None else f"{way.per_million:,.3g}"


def _days(seconds: float) -> str:
    return f"{seconds / _DAY:,.1f} days" if seconds > _DAY else f"{seconds / 3600:,.1f} hours"


def _slices(plans: Sequence[TrainingPlan]) -> Table:
    priced = any(plan.best and plan.best.per_million is not None for plan in plans)
    runs = any(plan.best and plan.best.run_seconds is not None for plan in plans)
    headers = ["slice", "best way", "ms a step", f"{plans[0].counted}s/s a chip", "MFU"]
    headers += [*(["price a million"] if priced else []), *(["the run"] if runs else [])]
    rows = []
    for plan in plans:
        best = plan.best
        if best is None:
            rows.append([plan.slice, "nothing fits", *[""] * (len(headers) - 2)])
            continue
        row = [plan.slice, best.words, _seconds(best), f"{best.rate:,.0f}", _percent(best.mfu)]
        row += [_price(best)] if priced else []
        row += [_days(best.run_seconds)] if runs and best.run_seconds else []
        rows.append(row)
    return Table(headers=headers, rows=rows, numbers=range(2, len(headers)))
