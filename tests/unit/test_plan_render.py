import re
from html import escape
from html.parser import HTMLParser

import pytest

from spmdzero.plan import MeshSpec, ParamSpec, Role, ShardingPlan

NAMES = ["wte.weight", "h[bold].bias", "<script>alert(1)</script>", "odd & even", "a" * 300]


@pytest.fixture
def plan():
    shapes = [(50257, 768), (64,), (24, 4096), (91, 37), (4096, 4096)]
    params = [
        ParamSpec(name=name, shape=shape, dtype="bfloat16", trainable=True)
        for name, shape in zip(NAMES, shapes, strict=True)
    ]
    return ShardingPlan.build(
        params,
        stage=1,
        mesh=MeshSpec((("fsdp", 8),)),
        master=True,
        moments=("exp_avg", "exp_avg_sq"),
        accumulator_dtype=None,
        accumulation_steps=4,
    )


class Cells(HTMLParser):
    """The text of every cell, row by row; fails on tags that don't nest."""

    def __init__(self, html):
        super().__init__()
        self.open, self.rows = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def row_of(text, name):
    return next(line for line in text.splitlines() if line.strip().startswith(name))


def test_text_has_a_row_for_each_tensor_with_its_placements_and_reason(plan):
    text = str(plan)
    assert row_of(text, "wte.weight").split() == [
        *("wte.weight", "50,257x768", "bfloat16"),
        *("R", "P", "S(1)", "S(1)", "S(1)"),
    ]
    assert row_of(text, "h[bold].bias").endswith("64 elements < min_shard_elements 2,048")
    odd = row_of(text, "odd & even")
    assert "F(pad 3,367->3,368)" in odd
    assert odd.endswith("no dim divides by 8: flattened, 3,367 padded to 3,368")
    assert all(name in text for name in NAMES)


def test_text_ends_with_bytes_per_role_aligned_to_the_right(plan):
    memory = plan.memory()
    lines = str(plan).split("Memory per device")[1].splitlines()
    rows = [line for line in lines if line.strip()]
    assert [row.split() for row in rows[2:]] == [
        *([role, f"{memory[role]:,}"] for role in Role),
        ["total", f"{memory.total:,}"],
    ]
    # The header, the rule and every number end in the same column.
    assert len({len(row) for row in rows}) == 1


def test_text_does_not_depend_on_the_terminal(plan, monkeypatch):
    before = str(plan)
    for name, value in {"COLUMNS": "20", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    assert str(plan) == before
    assert "\x1b" not in before


def test_html_escapes_names_and_has_all_cells(plan):
    html = plan._repr_html_()
    rows = Cells(html).rows
    assert [row[0] for row in rows[1 : len(NAMES) + 1]] == NAMES
    assert {len(row) for row in rows[: len(NAMES) + 1]} == {4 + len(Role)}
    assert rows[-1] == ["total", f"{plan.memory().total:,}"]
    assert escape(NAMES[2]) in html
    assert "<script" not in html


def test_html_brings_no_colours_and_no_outside_files(plan):
    html = plan._repr_html_() + plan.compare()._repr_html_()
    assert set(re.findall(r"\bcolor:([^;\"]+)", html)) == {"inherit"}
    assert set(re.findall(r"background[^:]*:([^;\"]+)", html)) == {"transparent"}
    assert set(re.findall(r"border[-a-z]*:([^;\"]+)", html)) == {
        "collapse",
        "1px solid currentColor",
    }
    assert "src=" not in html
    assert "href" not in html
    assert "<style" not in html


def test_comparison_shows_the_three_stages_and_the_paper(plan):
    comparison = plan.compare()
    totals = [f"{plan.at_stage(stage).memory().total:,}" for stage in (0, 1, 2)]
    assert row_of(str(comparison), "total").split() == ["total", *totals]
    paper = [f"{size:,}" for size in comparison.paper]
    assert row_of(str(comparison), "ZeRO paper").split()[2:] == paper
    rows = Cells(comparison._repr_html_()).rows
    assert rows[-2:] == [["total", *totals], ["ZeRO paper", *paper]]
    assert "1910.02054" in str(comparison)


def test_repr_is_one_line_however_large_the_model(plan):
    assert repr(plan) == "ShardingPlan(stage=1, mesh=[fsdp=8], 5 tensors)"


def test_an_empty_plan_prints(plan):
    empty = ShardingPlan.build(
        [],
        stage=2,
        mesh=plan.mesh,
        master=True,
        moments=(),
        accumulator_dtype=None,
        accumulation_steps=1,
    )
    assert row_of(str(empty), "total").split() == ["total", "0"]


def test_memory_html_has_a_row_for_each_role_and_the_total(plan):
    memory = plan.memory()
    rows = Cells(memory._repr_html_()).rows
    assert rows[1:] == [
        *([str(role), f"{size:,}"] for role, size in memory),
        ["total", f"{memory.total:,}"],
    ]
