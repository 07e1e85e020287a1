"""An explanation as text and as HTML."""

import io
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from spmdzero.audit import AuditReport
from spmdzero.show._rich import Console, Table, box
from spmdzero.show._tables import Grid, fit_grid, flops_grid, moves_grid, refused_grid

if TYPE_CHECKING:
    from spmdzero.explain._explanation import Explanation

# Wider than any row, so that no terminal width wraps or cuts one.
_UNBOUNDED = 100_000
_WRONG = "3. What is wrong?"
_ONLY_IN_A_RUN = (
    "Nothing was trained: replicated states, parameter drift, missing donation, recompilation, "
    "host reads and CPU fallbacks show in a run only."
)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
"""


def text(explanation: "Explanation") -> str:
    """The explanation as aligned text without colour codes."""
    lines = [_heading(explanation), _flags(explanation)]
    for part in _parts(explanation):
        if isinstance(part, Grid):
            lines += ["", part.title, *_table(part), *(f"  {note}" for note in part.notes)]
        else:
            lines += ["", _WRONG, "", *str(part).splitlines(), *_notes_on(part)]
    return "\n".join(lines)


def html(explanation: "Explanation") -> str:
    """The explanation as HTML tables in the reader's own colours."""
    parts = [f"<p><b>{escape(_heading(explanation))}</b><br>{escape(_flags(explanation))}</p>"]
    for part in _parts(explanation):
        if isinstance(part, Grid):
            parts.append(f"<h3>{escape(part.title)}</h3>{_html_table(part)}{_list(part.notes)}")
        else:
            parts.append(f"<h3>{_WRONG}</h3>{part._repr_html_()}{_list(_notes_on(part))}")
    return "<div>" + "".join(parts) + "</div>"


def page(explanations: "Iterable[Explanation]") -> str:
    """Explanations, one below the other, as a whole HTML document."""
    body = "<hr>".join(map(html, explanations))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>spmdzero explain</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _heading(explanation: "Explanation") -> str:
    micro = explanation.accumulation
    return (
        f"ZeRO stage {explanation.stage} on the mesh {explanation.mesh}, "
        f"{micro} micro-batch{'es' if micro > 1 else ''} a step, "
        f"{explanation.tokens:,} tokens a device and step"
    )


def _flags(explanation: "Explanation") -> str:
    return f"flags of the TPU compiler: {', '.join(explanation.xla_flags)}"


def _notes_on(audit: AuditReport) -> tuple[str, ...]:
    return () if audit.steps else (_ONLY_IN_A_RUN,)


def _list(notes: tuple[str, ...]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _parts(explanation: "Explanation") -> Iterator[Grid | AuditReport]:
    yield fit_grid(explanation)
    for moves in explanation.moves:
        yield moves_grid(moves)
        if moves.refused:
            yield refused_grid(moves)
    yield explanation.audit
    yield flops_grid(explanation)


def _table(grid: Grid) -> list[str]:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for index, heading in enumerate(grid.headers):
        justify = "right" if index in grid.numbers else "left"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in grid.rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(
        file=out, width=_UNBOUNDED, color_system=None, markup=False, highlight=False,
        force_jupyter=False,
    ).print(table)  # fmt: skip
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def _html_table(grid: Grid) -> str:
    # No colour is set, so the page's own theme, light or dark, keeps the text readable.
    rule = "padding:.2em .8em;border-bottom:1px solid rgba(128,128,128,.35);white-space:nowrap"

    def cell(tag: str, index: int, content: str) -> str:
        align = "right" if index in grid.numbers else "left"
        return f'<{tag} style="{rule};text-align:{align}">{escape(content)}</{tag}>'

    def row(tag: str, cells: tuple[str, ...]) -> str:
        return f"<tr>{''.join(cell(tag, i, c) for i, c in enumerate(cells))}</tr>"

    body = "".join(row("td", cells) for cells in grid.rows)
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse">'
        f"<thead>{row('th', grid.headers)}</thead><tbody>{body}</tbody></table></div>"
    )
