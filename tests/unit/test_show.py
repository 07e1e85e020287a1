"""What is shown, as text and as HTML: every object's page, whatever the object."""

import re
from html.parser import HTMLParser

import pytest

from spmdzero.audit import AuditReport, Check, Diagnosis, Finding
from spmdzero.inspect import CollectiveLedger, Shard, ShardView
from spmdzero.plan import MeshSpec, ParamSpec, Role, ShardingPlan
from tests.unit.test_ledger import LOOP, TPU

pytestmark = pytest.mark.backends("any")

BAD = "<script>alert(1)</script> w[0] & [bold]"
NAMES = ["wte.weight", "h[bold].bias", BAD, "odd & even", "a" * 300]
SHAPES = [(50257, 768), (64,), (24, 4096), (91, 37), (4096, 4096)]
MESH = MeshSpec((("fsdp", 8),))


def plan_of(params: list[ParamSpec]) -> ShardingPlan:
    return ShardingPlan.build(
        params, stage=1, mesh=MESH, master=True, moments=("exp_avg", "exp_avg_sq"),
        accumulator_dtype=None, accumulation_steps=4,
    )  # fmt: skip


PLAN = plan_of(
    [
        ParamSpec(name=name, shape=shape, dtype="bfloat16", trainable=True)
        for name, shape in zip(NAMES, SHAPES, strict=True)
    ]
)
COMPARISON, MEMORY = PLAN.compare(), PLAN.memory()
LEDGER = CollectiveLedger.from_hlo(
    TPU.replace("channel_id=9,", f'metadata={{op_name="{BAD}"}}, channel_id=9,')
)
FINDING = Finding(
    name="parameter-drift", severity="error", subject=BAD, cause="why " * 60, fix="f",
    evidence="[8, 4] of [64, 4]",
)  # fmt: skip
REPORT = AuditReport(findings=(FINDING,) * 2, steps=3, programs=("micro", "boundary"))
DIAGNOSIS = Diagnosis(
    checks=tuple(
        Check(name=status, status=status, said=BAD, fix="f" if status == "warning" else "")
        for status in ("ok", "note", "warning", "error")
    )
)
SHARDS = ShardView(
    shape=(8, 4), dtype="float32", element_bytes=4,
    shards=(Shard(device=BAD, slices=(slice(0, 4), slice(0, 4))),),
)  # fmt: skip
SHOWN = {
    "plan": PLAN,
    "empty plan": plan_of([]),
    "memory": MEMORY,
    "comparison": COMPARISON,
    "ledger": LEDGER,
    "ledger without names": CollectiveLedger.from_hlo(LOOP),
    "audit": REPORT,
    "clean audit": AuditReport(findings=(), steps=3, programs=()),
    "diagnosis": DIAGNOSIS,
    "shards": SHARDS,
}
EACH = pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)


class Cells(HTMLParser):
    """The text of every cell, row by row; fails on tags that don't nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.rows = list[str](), list[list[str]]()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """`<rect/>` holds nothing."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@EACH
def test_html_is_whole_and_escaped_and_needs_nothing_from_outside(shown: object) -> None:
    html = shown._repr_html_()  # type: ignore[attr-defined]
    Cells(html)
    assert not re.search(r"<(script|style|link|img|iframe)\b|\b(href|src|class)=|\burl\(", html)


@EACH
def test_html_sets_no_colour_that_one_theme_would_hide(shown: object) -> None:
    html = shown._repr_html_()  # type: ignore[attr-defined]
    # A hue of middle lightness reads on white and on black, as translucent greys do.
    inherited = {"inherit", "currentColor"}
    middle = {"#d64545", "#c98a1b", "#3a9a5b", "#888888"}
    assert set(re.findall(r"\bcolor:([^;\"]+)", html)) <= inherited | middle
    backgrounds = {"transparent", "rgba(128,128,128,.1)"}
    assert set(re.findall(r"background[^:]*:([^;\"]+)", html)) <= backgrounds


@EACH
def test_text_has_no_colour_codes_and_does_not_depend_on_the_terminal(
    shown: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = str(shown)
    for name, value in {"COLUMNS": "20", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    assert str(shown) == before
    assert "\x1b" not in before
    assert not [line for line in before.splitlines() if line != line.rstrip()]


def row_of(shown: object, name: str) -> str:
    return next(line for line in str(shown).splitlines() if line.strip().startswith(name))


def test_a_plan_has_a_row_for_each_tensor_with_its_placements_and_reason() -> None:
    placements = ["R", "P", "S(1)", "S(1)", "S(1)"]
    assert row_of(PLAN, "wte").split() == ["wte.weight", "50,257x768", "bfloat16", *placements]
    assert row_of(PLAN, "h[bold].bias").endswith("64 elements < min_shard_elements 2,048")
    odd = row_of(PLAN, "odd & even")
    assert "F(pad 3,367->3,368)" in odd
    assert odd.endswith("no dim divides by 8: flattened, 3,367 padded to 3,368")
    rows = Cells(PLAN._repr_html_()).rows
    assert [row[0] for row in rows[1 : len(NAMES) + 1]] == NAMES
    assert {len(row) for row in rows[: len(NAMES) + 1]} == {4 + len(Role)}


def test_a_plan_ends_with_bytes_per_role_aligned_to_the_right() -> None:
    by_role = [[str(role), f"{MEMORY[role]:,}"] for role in Role]
    expected = [*by_role, ["total", f"{MEMORY.total:,}"]]
    lines = str(PLAN).split("Memory per device\n")[1].splitlines()
    rows = [line for line in lines if line]
    assert [row.split() for row in rows[2:]] == expected
    # The header, the rule and every number end in the same column.
    assert len({len(row) for row in rows}) == 1
    assert Cells(PLAN._repr_html_()).rows[-6:] == expected
    assert Cells(MEMORY._repr_html_()).rows[1:] == expected
    assert row_of(SHOWN["empty plan"], "total").split() == ["total", "0"]


def test_a_comparison_shows_the_four_stages_and_the_paper() -> None:
    totals = [f"{PLAN.at_stage(stage).memory().total:,}" for stage in range(4)]
    assert COMPARISON.paper is not None
    paper = [f"{size:,}" for size in COMPARISON.paper]
    assert row_of(COMPARISON, "total").split() == ["total", *totals]
    assert row_of(COMPARISON, "ZeRO paper").split()[2:] == paper
    rows = Cells(COMPARISON._repr_html_()).rows
    assert rows[-2:] == [["total", *totals], ["ZeRO paper", *paper]]
    assert "1910.02054" in str(COMPARISON)


def test_a_ledger_names_totals_and_each_untagged_collective() -> None:
    text = str(LEDGER)
    # Of how many isn't said: that depends on what a backend makes an input of.
    assert "; donated inputs: 1" in text
    assert text.count("untagged: ") == len(LEDGER.activations) == 3
    unnamed = str(SHOWN["ledger without names"])
    assert "roles unknown" in unnamed
    assert "untagged" not in unnamed


def test_details_of_a_ledger_have_one_line_for_each_collective_in_order() -> None:
    # A summary, headings and a rule stand before them, the untagged below.
    lines = LEDGER.details().splitlines()[3:-3]
    for line, collective in zip(lines, LEDGER.collectives, strict=True):
        assert line.split()[0] == (collective.role or "untagged")
        assert {collective.tensor, f"{collective.bytes:,}"} <= {*line.split(), ""}
        assert str(list(collective.shape)) in line


def test_an_audit_has_each_finding_with_cause_fix_and_evidence() -> None:
    lines = str(REPORT).splitlines()
    assert lines[0] == "audit of 3 steps, programs read: micro and boundary. 2 findings"
    assert lines[1] == f"✗ parameter-drift: {BAD}"
    labels = [line[2:13].strip() for line in lines[2:] if line.startswith("  ")]
    assert [label for label in labels if label] == ["cause", "fix", "evidence"] * 2
    assert "  evidence   [8, 4] of [64, 4]" in lines
    assert max(map(len, lines)) <= 100
    clean = str(SHOWN["clean audit"])
    assert clean == "audit of 3 steps, programs read: none. nothing found"
    assert str(DIAGNOSIS).splitlines()[:2] == ["2 problems", f"✓ ok: {BAD}"]


def test_a_repr_is_one_line_however_large_the_object() -> None:
    def first_line(shown: object) -> str:
        return str(shown).splitlines()[0]

    assert repr(PLAN) == "ShardingPlan(stage=1, mesh=[fsdp=8], 5 tensors)"
    assert repr(LEDGER) == f"CollectiveLedger({first_line(LEDGER)})"
    assert repr(SHARDS) == f"ShardView({first_line(SHARDS)})"
