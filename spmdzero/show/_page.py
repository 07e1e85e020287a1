"""Pages of text, tables and findings, which are drawn as text and as HTML.

The HTML uses the page's own colours, or translucent ones, so that it suits light and dark themes.
"""

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

_CELL = "padding:2px 8px;background:transparent;color:inherit;vertical-align:top;"
# If a page is too narrow for a row, words wrap to a second line, and numbers don't.
_NUMBER, _WORDS = "white-space:nowrap;text-align:right", "text-align:left"
_LINE = "border-bottom:1px solid currentColor;"
_THIN_LINE = "border-bottom:1px solid rgba(128,128,128,.25);"
# A sentence in a cell would else be one word wide where a page is narrow, and its row very high.
_SENTENCE, _SENTENCE_STYLE = 30, ";min-width:16em"
_MARKS = {"error": "✗", "warning": "!", "ok": "✓", "note": "·"}
_HUES = {"error": "#d64545", "warning": "#c98a1b", "ok": "#3a9a5b", "note": "#888888"}
# Widths of the columns of a finding's text: its labels, and its sentences.
_LABEL, _SAID = 13, 87
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
/* A shadow where a wide table goes on; at its end the page's colour covers the shadow. */
div:has(> table) {
  background:
    linear-gradient(to right, Canvas 40%, transparent) left / 2.5em 100% local,
    linear-gradient(to left, Canvas 40%, transparent) right / 2.5em 100% local,
    linear-gradient(to right, rgba(128, 128, 128, .5), transparent) left / .9em 100% scroll,
    linear-gradient(to left, rgba(128, 128, 128, .5), transparent) right / .9em 100% scroll;
  background-repeat: no-repeat;
}
"""


class Part(Protocol):
    """One part of a page, as text and as HTML."""

    def text(self) -> str: ...

    def html(self) -> str: ...


@dataclass(frozen=True)
class Page:
    """Parts, one below the other.

    Attributes:
        parts: the parts; a part without text appears in HTML only.
        title: the title of the document.
    """

    parts: tuple[Part, ...]
    title: str = "spmdzero"

    def text(self) -> str:
        """The parts as text, with an empty line between them."""
        return "\n\n".join(filter(None, (part.text() for part in self.parts)))

    def html(self) -> str:
        """The parts in one HTML element."""
        return f"<div>{''.join(part.html() for part in self.parts)}</div>"

    def document(self) -> str:
        """A whole HTML document."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body>{self.html()}</body></html>\n"
        )


@dataclass(frozen=True)
class Lines:
    """Lines of text, shown as they are."""

    lines: Sequence[str]

    def text(self) -> str:
        """The lines."""
        return "\n".join(self.lines)

    def html(self) -> str:
        """The lines in one paragraph."""
        return f'<p style="color:inherit">{"<br>".join(map(escape, self.lines))}</p>'


@dataclass(frozen=True)
class Heading:
    """A heading above the parts of a section."""

    line: str

    def text(self) -> str:
        """The line."""
        return self.line

    def html(self) -> str:
        """A heading of the second level."""
        style = "color:inherit;font-size:1.15em;margin:1.6em 0 .4em"
        return f'<h2 style="{style}">{escape(self.line)}</h2>'


@dataclass(frozen=True)
class Folded:
    """Parts that HTML shows when the reader unfolds them."""

    title: str
    parts: tuple[Part, ...]

    def text(self) -> str:
        """The parts as text, unfolded."""
        return "\n\n".join(part.text() for part in self.parts)

    def html(self) -> str:
        """A line that unfolds."""
        inside = "".join(part.html() for part in self.parts)
        return (
            f'<details style="margin:.6em 0"><summary style="cursor:pointer">{escape(self.title)}'
            f"</summary>{inside}</details>"
        )


@dataclass(frozen=True)
class Source:
    """The text of a file, which is shown in HTML only: a reader of text has the file."""

    source: str

    def text(self) -> str:
        """An empty string."""
        return ""

    def html(self) -> str:
        """The text of the file, unchanged."""
        return f'<pre style="overflow-x:auto;color:inherit">{escape(self.source)}</pre>'


@dataclass(frozen=True)
class Verbatim:
    """Lines that a reader copies: a JSON, a command."""

    lines: str

    def text(self) -> str:
        """The lines, unchanged."""
        return self.lines

    def html(self) -> str:
        """The lines, unchanged."""
        return Source(self.lines).html()


@dataclass(frozen=True)
class InHtml:
    """A part that is too long for a terminal, and is shown in HTML only."""

    part: Part

    def text(self) -> str:
        """An empty string."""
        return ""

    def html(self) -> str:
        """The part."""
        return self.part.html()


@dataclass(frozen=True)
class About:
    """The subject of a page, which is shown in HTML only: text appears below the command."""

    title: str
    told: Sequence[tuple[str, str]]

    def text(self) -> str:
        """An empty string."""
        return ""

    def html(self) -> str:
        """A heading, and a line for each name and its text."""
        lines = "".join(
            '<div style="display:flex"><span style="opacity:.65;flex:0 0 6em">'
            f'{escape(name)}</span><span style="overflow-wrap:anywhere">{escape(said)}</span></div>'
            for name, said in self.told
            if said
        )
        style = "color:inherit;font-size:1.5em;margin:0 0 .4em"
        return f'<h1 style="{style}">{escape(self.title)}</h1>{lines}'


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings.

    Attributes:
        title: the line above the table.
        headers: the heading of each column.
        rows: the cells of each row.
        numbers: indices of the columns that are aligned to the right.
        totals: number of last rows that are set apart.
        notes: the lines below the table.
    """

    title: str = ""
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[int] = ()
    totals: int = 0
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Title, headings, a rule, rows, and notes, without wrapping."""
        widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        lines = [self._aligned(row, widths) for row in (self.headers, *self.rows)]
        lines.insert(1, " " + "─" * (sum(widths) + 3 * len(widths) - 3))
        if self.totals:
            lines.insert(-self.totals, "")
        return "\n".join(
            [*filter(None, [self.title]), *lines, *(f"  {n}".rstrip() for n in self.notes)]
        )

    def html(self) -> str:
        """A table that needs no stylesheet."""
        ends = len(self.rows) - self.totals - 1 if self.totals else None
        head = self._html_row("th", self.headers, _LINE)
        body = [
            self._html_row("td", row, _LINE if index == ends else _THIN_LINE)
            for index, row in enumerate(self.rows)
        ]
        return (
            '<div style="overflow-x:auto;margin:.8em 0 .4em">'
            '<table style="border-collapse:collapse;background:transparent;color:inherit">'
            '<caption style="text-align:left;color:inherit">'
            f"{escape(self.title)}</caption>"
            f"<thead>{head}</thead><tbody>{''.join(body)}</tbody></table></div>"
        ) + "".join(
            f'<p style="color:inherit"><small>{escape(note)}</small></p>' for note in self.notes
        )

    def _aligned(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = (
            cell.rjust(width) if column in self.numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return " " + "   ".join(cells).rstrip()

    def _html_row(self, tag: str, row: Sequence[str], line: str) -> str:
        styles = (
            _NUMBER
            if column in self.numbers
            else _WORDS + _SENTENCE_STYLE * (len(cell) > _SENTENCE)
            for column, cell in enumerate(row)
        )
        cells = (
            f'<{tag} style="{line}{_CELL}{style}">{escape(cell)}</{tag}>'
            for cell, style in zip(row, styles, strict=True)
        )
        return f'<tr style="background:transparent">{"".join(cells)}</tr>'


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One finding or check.

    Attributes:
        status: ``"error"``, ``"warning"``, ``"ok"`` or ``"note"``.
        title: a title of one line.
        said: label -> text.
    """

    status: str
    title: str
    said: dict[str, str]

    def text(self) -> str:
        """A mark and the title; below them each label with its text, wrapped."""
        lines = [f"{_MARKS[self.status]} {self.title}"]
        for label, said in self.said.items():
            first, *more = textwrap.wrap(said, _SAID, break_on_hyphens=False) or [""]
            lines.append(f"{'  ' + label:<{_LABEL}}{first}".rstrip())
            lines += [" " * _LABEL + line for line in more]
        return "\n".join(lines)

    def html(self) -> str:
        """A box with a coloured edge."""
        hue = _HUES[self.status]
        lines = "".join(
            '<div style="display:flex"><span style="opacity:.65;min-width:6em">'
            f"{escape(label)}</span><span>{escape(said)}</span></div>"
            for label, said in self.said.items()
        )
        return (
            f'<div style="border-left:4px solid {hue};background:rgba(128,128,128,.1);'
            f'padding:.4em .8em;margin:.4em 0;color:inherit"><b style="color:inherit">'
            f'<span style="color:{hue}">{_MARKS[self.status]}</span> {escape(self.title)}</b>'
            f"{lines}</div>"
        )


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Findings or checks under a headline, with notes below."""

    headline: Sequence[str]
    entries: Sequence[Entry]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Headline, entries and notes, without empty lines between them."""
        return "\n".join([*self.headline, *(e.text() for e in self.entries), *self.notes])

    def html(self) -> str:
        """The entries as boxes below each other."""
        boxes = "".join(entry.html() for entry in self.entries)
        notes = Lines(self.notes).html() if self.notes else ""
        return f'<div style="color:inherit">{Lines(self.headline).html()}{boxes}{notes}</div>'
