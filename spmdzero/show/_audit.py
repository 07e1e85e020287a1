"""Audits and diagnoses as text and as HTML."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from spmdzero.show._rich import Console, Table, Text, box

_WIDTH = 100
_MARKS = {"error": "✗", "warning": "!", "ok": "✓", "note": "·"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One finding or check before it is text or HTML.

    Attributes:
        status: ``"error"``, ``"warning"``, ``"ok"`` or ``"note"``.
        title: one line.
        lines: label and text of what is said about it.
    """

    status: str
    title: str
    lines: tuple[tuple[str, str], ...]


def text(headline: str, entries: Iterable[Entry]) -> str:
    """A headline, and a table of marks, titles and lines; no colour codes."""
    out = io.StringIO()
    # In a notebook rich would display instead of writing to the file.
    console = Console(
        file=out, width=_WIDTH, color_system=None, force_jupyter=False, legacy_windows=False
    )
    console.print(Text(headline))
    for entry in entries:
        console.print(Text(f"{_MARKS[entry.status]} {entry.title}"), soft_wrap=True)
        if not entry.lines:
            continue
        table = Table(box=box.SIMPLE, show_header=False, show_edge=False, pad_edge=False)
        table.add_column(no_wrap=True, min_width=10)
        table.add_column(overflow="fold")
        for label, said in entry.lines:
            # Text, because rich reads "[0]" in a plain string as markup.
            table.add_row(Text(f"  {label}"), Text(said))
        console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def html(headline: str, entries: Iterable[Entry]) -> str:
    """The same as a list that needs nothing from outside."""
    items = "".join(_item(entry) for entry in entries)
    return f'<div style="color:inherit"><p>{escape(headline)}</p>{items}</div>'


def _item(entry: Entry) -> str:
    # Translucent greys and a hue of middle lightness read on white and on black alike.
    hue = {"error": "#d64545", "warning": "#c98a1b", "ok": "#3a9a5b"}.get(entry.status, "#888888")
    lines = "".join(
        f'<div style="display:flex"><span style="opacity:.65;min-width:6em">{escape(label)}</span>'
        f"<span>{escape(said)}</span></div>"
        for label, said in entry.lines
    )
    return (
        f'<div style="border-left:4px solid {hue};background:rgba(128,128,128,.1);'
        f'padding:.4em .8em;margin:.4em 0;color:inherit"><b style="color:inherit">'
        f'<span style="color:{hue}">{_MARKS[entry.status]}</span> {escape(entry.title)}</b>'
        f"{lines}</div>"
    )
