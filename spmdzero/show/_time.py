"""Pages of a step's time: a bar of kinds, tables of modules and of the dearest operations."""

from collections import defaultdict
from collections.abc import Iterator

from spmdzero._display import page_of
from spmdzero.explain import SHORTEST, Calibrated, Share, StepTime, siblings
from spmdzero.plan import sized
from spmdzero.show._bar import Bar, Segment
from spmdzero.show._page import Page, Part, Table

_MODULES = 12
_MODELLED = ("kernels", "wire", "host")


@page_of.register
def time_page(time: StepTime) -> Page:
    """A page with the bar and the tables below each other."""
    return Page(tuple(time_parts(time)))


def time_parts(time: StepTime) -> Iterator[Part]:
    """Yields the parts of an explanation that show one target's time."""
    yield _bar(time)
    yield _modules(time)
    yield _dearest(time)


def _bar(time: StepTime) -> Bar:
    notes = [
        f"{time.cycles / 1e6:,.2f} M cycles at {time.clock / 1e9:.2f} GHz, by libtpu's own "
        f"estimate: {milliseconds(time.compiled)}",
        f"kernels, at least, by a model of their products and bytes: {milliseconds(time.kernels)}",
        f"communication, at least, by the bytes sent: {milliseconds(time.wire)}, of which "
        f"{milliseconds(time.hidden)} overlap compute; the chip waits {milliseconds(time.exposed)}",
    ]
    if time.host:
        notes.append(
            f"host memory, at least, by a model: {sized(time.from_host)} from it and "
            f"{sized(time.to_host)} to it at {rate(time.host_rate)} each way: "
            f"{milliseconds(time.host)}; the chip waits {milliseconds(time.host_exposed)}"
        )
    notes.append(_on_the_scale(time))
    for why in time.not_counted:
        notes.append(f"the model's arithmetic is not counted: {why}")
    if time.uncounted:
        notes.append(f"of {time.uncounted:,} fusions libtpu estimates nothing: they count as 0")
    return Bar(
        title=f"on {time.target}: {milliseconds(time.seconds)}, {utilisation(time)}",
        segments=[
            Segment(
                label=f"{kind.name}{' (modelled)' if kind.name in _MODELLED else ''}",
                value=milliseconds(kind.seconds),
                # A kind of 0.000 ms is not shown.
                share=kind.seconds / time.seconds if round(kind.seconds, 6) else 0.0,
            )
            for kind in time.kinds
        ],
        notes=notes,
    )


def _on_the_scale(time: StepTime) -> str:
    found = time.calibrated
    if found is None and time.seconds < SHORTEST:
        return "shorter than 10 ms: what starts a program counts too, so it isn't calibrated"
    if found is None:
        return "no step was measured on such a chip: nothing tells how far off this estimate is"
    low, high = milliseconds(found.low), milliseconds(found.high)
    after = f": {found.note}" if found.note else ""
    return (
        f"on the scale of {found.rows_in_all} measured steps, {found.rows} of them on such chips: "
        f"{milliseconds(found.seconds)}, {low} to {high} with a probability of 80 %{after}"
    )


def _modules(time: StepTime) -> Table:
    """A table with one row per module, or per group of siblings; the last row is the rest."""
    groups: dict[str | None, list[Share]] = defaultdict(list)
    for share in time.modules:
        groups[siblings(share.name)].append(share)
    rows = [
        (name, sum(s.seconds for s in shares), sum(s.operations for s in shares))
        for name, shares in groups.items()
    ]
    rows.sort(key=lambda row: -row[1])
    shown, rest = rows[:_MODULES], rows[_MODULES:]
    if rest:
        shown.append(("(the rest)", sum(r[1] for r in rest), sum(r[2] for r in rest)))
    return Table(
        title=f"By module, forward and backward, on {time.target}",
        headers=("module", "time", "of the step", "operations"),
        rows=[
            (_module(name), milliseconds(seconds), _share(seconds, time), f"{operations:,}")
            for name, seconds, operations in shown
        ],
        numbers=(1, 2, 3),
    )


def _dearest(time: StepTime) -> Table:
    rows = [
        (
            milliseconds(o.seconds),
            _share(o.seconds, time),
            f"{o.runs:,}",
            f"{o.kind} (modelled)" if o.modelled else o.kind,
            o.traced_as,
            _module(o.module),
            o.source.rpartition("/")[2],
            o.name if len(o.name) <= 40 else f"{o.name[:37]}...",
        )
        for o in time.dearest
    ]
    words = [
        "time",
        "of the step",
        "times",
        "kind",
        "operation",
        "module",
        "source",
        "the first in HLO",
    ]
    if not any(o.source for o in time.dearest):
        # JAX's backend writes no sources.
        column = words.index("source")
        words.pop(column)
        rows = [(*row[:column], *row[column + 1 :]) for row in rows]
    return Table(
        title=f"The most expensive operations on {time.target}",
        headers=words,
        rows=rows,
        numbers=(0, 1, 2),
    )


def milliseconds(seconds: float) -> str:
    """The time in milliseconds, such as ``92.008 ms``."""
    return f"{1e3 * seconds:,.3f} ms"


def and_calibrated(said: str, found: Calibrated | None) -> str:
    """A time and, where it is known, the one on the scale of measured steps.

    Such as ``92.0 ms, calibrated 95.1 (82.0 to 110)``.
    """
    if found is None:
        return said
    seconds, low, high = (short(1e3 * s) for s in (found.seconds, found.low, found.high))
    return f"{said}, calibrated {seconds} ({low} to {high})"


def short(number: float) -> str:
    """A number with three digits."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 0.1 or not number else f"{number:.2f}"


def utilisation(time: StepTime) -> str:
    """Both shares of the chip's peak, such as ``MFU 14.4 %, HFU 19.3 % of the chip's peak``."""
    model = "not counted" if time.mfu is None else f"{100 * time.mfu:.1f} %"
    return f"MFU {model}, HFU {100 * time.hfu:.1f} % of the chip's peak"


def rate(bytes_per_second: float) -> str:
    """A rate in gigabytes per second, such as ``16 GB/s``."""
    return f"{bytes_per_second / 1e9:g} GB/s"


def _share(seconds: float, time: StepTime) -> str:
    return f"{100 * seconds / time.seconds:.1f} %" if time.seconds else "-"


def _module(name: str | None) -> str:
    return {None: "(no module)", "": "(the model itself)"}.get(name, name or "")
