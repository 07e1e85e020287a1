"""The ledger as text and as HTML."""

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from spmdzero.show._rich import Console, Table, box

if TYPE_CHECKING:
    from spmdzero.inspect._ledger import Collective, CollectiveLedger

_GROUPED = ("role", "collective", "dtype", "tensors", "bytes", "wire bytes", "in loop")
_SINGLE = ("role", "tensor", "collective", "dtype", "shape", "bytes", "wire bytes")
_NUMERIC = ("tensors", "bytes", "wire bytes")


def ledger_text(ledger: "CollectiveLedger") -> str:
    """One line for each role and kind."""
    return _text(ledger, _GROUPED, _grouped(ledger))


def details_text(ledger: "CollectiveLedger") -> str:
    """One line for each collective."""
    rows = (
        (
            _role(ledger, c),
            c.tensor,
            _kind(c),
            c.dtype,
            str(list(c.shape)),
            f"{c.bytes:,}",
            f"{c.wire_bytes:,}",
        )
        for c in ledger.collectives
    )
    return _text(ledger, _SINGLE, rows)


def ledger_html(ledger: "CollectiveLedger") -> str:
    """One row for each role and kind, as a table that needs nothing from outside."""
    # No colour is set, so the notebook's own theme, light or dark, keeps the text readable.
    cell = "padding:.2em .8em;text-align:left;border-bottom:1px solid rgba(128,128,128,.35)"
    cell += ";white-space:nowrap"
    head = "".join(f'<th style="{cell}">{escape(h)}</th>' for h in _GROUPED)
    body = "".join(
        "<tr>" + "".join(f'<td style="{cell}">{escape(v)}</td>' for v in row) + "</tr>"
        for row in _grouped(ledger)
    )
    leaks = "".join(f"<li><code>{escape(leak)}</code></li>" for leak in _leaks(ledger))
    return (
        f"<div><p>{escape(summary(ledger))}</p>"
        '<div style="overflow-x:auto"><table style="border-collapse:collapse">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + (f"<ul>{leaks}</ul>" if leaks else "")
        + "</div>"
    )


def _text(
    ledger: "CollectiveLedger", headings: Sequence[str], rows: Iterable[tuple[str, ...]]
) -> str:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMERIC else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    # In a notebook rich would display instead of writing to the file.
    console = Console(
        file=out,
        width=160,
        color_system=None,
        markup=False,
        highlight=False,
        force_jupyter=False,
    )
    console.print(table)
    lines = [summary(ledger), *out.getvalue().splitlines(), *_leaks(ledger)]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def summary(ledger: "CollectiveLedger") -> str:
    """How much moves, in one line."""
    donated = "?" if ledger.aliased is None else ledger.aliased
    return (
        f"collectives: {len(ledger.collectives)}, {ledger.bytes:,} bytes, "
        f"{ledger.wire_bytes:,} on the wire, per device; "
        f"{donated} of {ledger.parameters} inputs donated"
    )


def _leaks(ledger: "CollectiveLedger") -> list[str]:
    if not ledger.named:
        return ["roles unknown: the HLO carries no op_name metadata"]
    return [f"untagged: {c.kind} {c.dtype}{list(c.shape)} {c.op_name}" for c in ledger.activations]


def _role(ledger: "CollectiveLedger", collective: "Collective") -> str:
    if collective.role:
        return collective.role
    return "unknown" if not ledger.named else "scalar" if collective.is_scalar else "untagged"


def _kind(collective: "Collective") -> str:
    sliced = collective.scattered and collective.kind == "all-reduce"
    return f"{collective.kind} + slice" if sliced else collective.kind


def _grouped(ledger: "CollectiveLedger") -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str, str, str], list[Collective]] = defaultdict(list)
    for c in ledger.collectives:
        key = (_role(ledger, c), _kind(c), c.dtype, "yes" if c.in_loop else "no")
        groups[key].append(c)
    for (role, kind, dtype, loop), members in sorted(groups.items()):
        total, wire = sum(c.bytes for c in members), sum(c.wire_bytes for c in members)
        yield role, kind, dtype, str(len(members)), f"{total:,}", f"{wire:,}", loop
