"""Plans and memory reports as text and as HTML."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from spmdzero.plan._roles import Role
from spmdzero.show._rich import Console, Table, Text, box

if TYPE_CHECKING:
    from spmdzero.plan._memory import MemoryReport, StageComparison
    from spmdzero.plan._plan import ShardingPlan
    from spmdzero.plan._tensors import TensorPlan

_LEGEND = "R replicated, S(dim) sharded, F flattened and sharded, P each device's own summand"
# Wider than any row, so that no terminal width wraps or cuts one.
_UNBOUNDED = 100_000


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """A table before it is text or HTML; the last `totals` rows stand under a line."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int]
    totals: int = 0
    note: str = ""


def plan_text(plan: "ShardingPlan") -> str:
    """The plan as aligned text without colour codes."""
    return _text(_plan_grids(plan))


def plan_html(plan: "ShardingPlan") -> str:
    """The plan as HTML tables that need no stylesheet."""
    return _html(_plan_grids(plan))


def memory_html(report: "MemoryReport") -> str:
    """Bytes per device of each role as an HTML table."""
    return _html([_memory_grid(report)])


def comparison_text(comparison: "StageComparison") -> str:
    """The stages side by side as aligned text."""
    return _text([_comparison_grid(comparison)])


def comparison_html(comparison: "StageComparison") -> str:
    """The stages side by side as an HTML table."""
    return _html([_comparison_grid(comparison)])


def _plan_grids(plan: "ShardingPlan") -> list[_Grid]:
    tensors = _Grid(
        title=f"ZeRO stage {plan.stage} on the mesh {plan.mesh}: {len(plan):,} tensors",
        headers=("name", "shape", "dtype", *Role, "why"),
        rows=[_tensor_row(tensor, plan) for tensor in plan],
        numbers=frozenset(),
        note=_LEGEND,
    )
    return [tensors, _memory_grid(plan.memory())]


def _memory_grid(report: "MemoryReport") -> _Grid:
    return _Grid(
        title="Memory per device",
        headers=("role", "bytes"),
        rows=_memory_rows([report]),
        numbers=frozenset({1}),
        totals=1,
    )


def _tensor_row(tensor: "TensorPlan", plan: "ShardingPlan") -> list[str]:
    placements = [tensor.placement(role) for role in Role]
    state = tensor.placement(Role.GRADIENT) or tensor.placement(Role.PARAMETER)
    return [
        tensor.name,
        "x".join(f"{length:,}" for length in tensor.shape) or "scalar",
        tensor.dtype(Role.PARAMETER),
        *("-" if found is None else found.short(tensor.shape, plan.mesh) for found in placements),
        "" if state is None or state.kind == "shard" else state.reason,
    ]


def _comparison_grid(comparison: "StageComparison") -> _Grid:
    rows = _memory_rows(comparison.stages)
    if comparison.paper is not None:
        rows.append(["ZeRO paper", *(f"{size:,}" for size in comparison.paper)])
    return _Grid(
        title="Bytes per device by ZeRO stage",
        headers=("role", "stage 0", "stage 1", "stage 2"),
        rows=rows,
        numbers=frozenset({1, 2, 3}),
        totals=len(rows) - len(Role),
        note=comparison.paper_note,
    )


def _memory_rows(reports: "Sequence[MemoryReport]") -> list[list[str]]:
    rows = [[str(role), *(f"{report[role]:,}" for report in reports)] for role in Role]
    return [*rows, ["total", *(f"{report.total:,}" for report in reports)]]


def _text(grids: Iterable[_Grid]) -> str:
    out = io.StringIO()
    # In a notebook rich would display instead of writing to the file.
    console = Console(
        file=out, width=_UNBOUNDED, color_system=None, force_jupyter=False, legacy_windows=False
    )
    for grid in grids:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, header in enumerate(grid.headers):
            # Text, because rich reads "[0]" in a plain string as markup.
            table.add_column(
                Text(header),
                justify="right" if column in grid.numbers else "left",
                no_wrap=True,
            )
        for index, row in enumerate(grid.rows):
            last_before_totals = index == len(grid.rows) - grid.totals - 1
            table.add_row(*map(Text, row), end_section=bool(grid.totals) and last_before_totals)
        console.print(Text(grid.title))
        console.print(table)
        if grid.note:
            console.print(Text(grid.note))
            console.print()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def _html(grids: Iterable[_Grid]) -> str:
    # Only inherited colours, so that the tables read in light and in dark themes.
    cell = "padding:2px 8px;background:transparent;color:inherit;white-space:nowrap;text-align:"
    line = "border-bottom:1px solid currentColor;"
    parts = []
    for grid in grids:
        aligns = ["right" if c in grid.numbers else "left" for c in range(len(grid.headers))]
        head = "".join(
            f'<th style="{line}{cell}{align}">{escape(header)}</th>'
            for header, align in zip(grid.headers, aligns, strict=True)
        )
        body = []
        for index, row in enumerate(grid.rows):
            ends = grid.totals and index == len(grid.rows) - grid.totals - 1
            cells = "".join(
                f'<td style="{line if ends else ""}{cell}{align}">{escape(value)}</td>'
                for value, align in zip(row, aligns, strict=True)
            )
            body.append(f'<tr style="background:transparent">{cells}</tr>')
        parts.append(
            '<div style="overflow-x:auto">'
            '<table style="border-collapse:collapse;background:transparent;color:inherit">'
            f'<caption style="text-align:left;color:inherit">{escape(grid.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )
        if grid.note:
            parts.append(f'<p style="color:inherit"><small>{escape(grid.note)}</small></p>')
    return f"<div>{''.join(parts)}</div>"
