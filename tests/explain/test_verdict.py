"""Whether a step fits, by whose bytes, and what would make it fit: sums over plans."""

import json
import re
from collections.abc import Mapping

import pytest

from spmdzero.audit import AuditReport
from spmdzero.explain import Explanation, Topology, Verdict
from spmdzero.explain._aot import CompilerMemory, needed_by
from spmdzero.explain._fit import TargetMemory, fit_of_stages
from spmdzero.explain._verdict import verdicts
from spmdzero.plan import MeshSpec, ParamSpec, ShardingPlan, sized
from spmdzero.show import together
from tests.unit.test_show import BAD, Cells

pytestmark = pytest.mark.backends("any")

GIB = 2**30


def plan_of(stage: int, devices: int, *, steps: int = 1, elements: int = GIB) -> ShardingPlan:
    """Of 2^30 bf16 parameters: 2 GiB of them, 12 GiB of states, 2 GiB of gradients, all told."""
    shape = (elements // 2**15, 2**15)
    return ShardingPlan.build(
        [ParamSpec(name="w", shape=shape, dtype="bfloat16", trainable=True)],
        stage=stage, mesh=MeshSpec((("fsdp", devices),)), master=True,
        moments=("exp_avg", "exp_avg_sq"), accumulator_dtype=None, accumulation_steps=steps,
    )  # fmt: skip


def verdict_of(
    plan: ShardingPlan, target: str, peak: float, *, rows: int = 1, others: Mapping[int, float] = {}
) -> Verdict:
    """Where the compiler for that target counts so many GiB, and those at other stages."""
    topology = Topology.parse(target)
    compiled = {
        stage: [
            TargetMemory(
                target=target,
                memory=CompilerMemory(arguments=None, peak=round(size * GIB)),
                hbm_bytes=topology.chip.hbm_bytes,
            )
        ]
        for stage, size in {plan.stage: peak, **others}.items()
    }
    (found,) = verdicts(plan, compiled, [topology], rows=rows)
    return found


def changes(verdict: Verdict) -> list[tuple[str, float | None]]:
    return [(c.what, None if c.peak is None else c.peak / GIB) for c in verdict.changes]


def test_the_parts_of_a_peak_are_the_plans_and_the_rest() -> None:
    found = verdict_of(plan_of(2, 8), "v5e:2x4", 10.5)
    parts = (found.parameters, found.states, found.gradients, found.rest)
    assert [part / GIB for part in parts] == [2, 1.5, 0.25, 6.75]
    assert (found.fits, found.changes) == (True, ())


def test_a_gradient_that_is_not_there_at_the_peak_is_not_counted() -> None:
    found = verdict_of(plan_of(0, 8), "v5e:2x4", 14.5)
    assert (found.gradients / GIB, found.rest) == (0.5, 0)


def test_a_higher_stage_is_named_by_the_plan_or_by_the_compiler_that_tried_it() -> None:
    planned = verdict_of(plan_of(0, 8), "v5e:2x4", 20.0)
    stage, *_ = planned.changes
    # 2 + 1.5 + 0.25, and the 4 GiB that were no state.
    assert (stage.what, stage.peak, stage.by) == (
        '"zero_optimization": {"stage": 1}', round(7.75 * GIB), "estimate",
    )  # fmt: skip
    tried = verdict_of(plan_of(0, 8), "v5e:2x4", 20.0, others={1: 17.0, 2: 12.0})
    stage, *_ = tried.changes
    assert (stage.what, stage.peak, stage.by) == (
        '"zero_optimization": {"stage": 2}', 12 * GIB, "compiler",
    )  # fmt: skip


def test_the_smallest_number_of_chips_that_is_enough_is_named_as_the_cloud_does() -> None:
    found = verdict_of(plan_of(2, 4), "v5e:2x2", 17.5)
    # 2 + 1.5 + 0.25 + 12 GiB.
    assert ("8 chips: v5e:2x4 (v5litepod-8)", 15.75) in changes(found)
    # No number of chips makes parameters and the rest smaller.
    found = verdict_of(plan_of(2, 4), "v5e:2x2", 20.0)
    assert not any("chips:" in what for what, _ in changes(found))


def test_fewer_rows_shrink_the_rest_and_bring_an_accumulator() -> None:
    found = verdict_of(plan_of(1, 8), "v5e:2x4", 35.75, rows=8)
    # The rest is 32 GiB; at stage 1 the accumulator of two micro-batches is whole, 2 GiB.
    rows = '2 rows a device in place of 8: "train_micro_batch_size_per_gpu": 2, '
    assert (f'{rows}"gradient_accumulation_steps": 4', 2 + 1.5 + 2 + 8) in changes(found)
    # One row can't be halved.
    found = verdict_of(plan_of(1, 8), "v5e:2x4", 35.75, rows=1)
    assert not any("rows a device" in what for what, _ in changes(found))


def test_recomputation_is_named_where_all_but_the_rest_has_room() -> None:
    def recomputes(verdict: Verdict) -> bool:
        return any("gradient_checkpointing" in what for what, _ in changes(verdict))

    assert recomputes(verdict_of(plan_of(2, 8), "v5e:2x4", 20.0))
    assert not recomputes(verdict_of(plan_of(0, 8), "v5e:2x4", 20.0))


def test_another_chip_is_the_smallest_that_has_room_and_has_as_many_devices() -> None:
    found = verdict_of(plan_of(2, 8), "v5e:2x4", 40.0)
    assert changes(found)[-1] == ("another chip: v5p with 95 GiB a chip, v5p:2x2x2", 40.0)
    assert changes(verdict_of(plan_of(2, 8), "v5e:2x4", 500.0))[-1][0].startswith("recompute")


def explanation_of(*found: Verdict, devices: int = 8) -> Explanation:
    plan = plan_of(2, devices)
    return Explanation(
        stage=2, mesh=str(plan.mesh), devices=devices, accumulation=1, tokens=1, counted="row",
        xla_flags=(), fits=fit_of_stages(plan, {}), paper_note="", moves=(),
        audit=AuditReport(findings=(), steps=0, programs=()), rooflines=(), verdicts=found,
        model=BAD, config={"train_batch_size": 8}, notes=(BAD,),
    )  # fmt: skip


FITS = verdict_of(plan_of(2, 8), "v5e:2x4", 10.5)
FULL = verdict_of(plan_of(2, 4), "v5e:2x2", 17.5)


def test_an_explanation_begins_with_its_verdicts() -> None:
    text = str(explanation_of(FITS))
    assert text.startswith(
        "Fits v5e:2x4: 10.5 of 16 GiB = parameters 2 + states 1.5 + gradients 0.25 + the rest 6.75."
    )
    first, *lines = str(explanation_of(FULL)).splitlines()
    assert first.startswith(
        "Doesn't fit v5e:2x2: 17.5 of 16 GiB = "
        "parameters 2 + states 3 + gradients 0.5 + the rest 12."
    )
    assert "  - 8 chips: v5e:2x4 (v5litepod-8): about 15.8 GiB" in lines
    # The verdicts of several numbers of devices stand together.
    both = together([explanation_of(FITS), explanation_of(FULL, devices=4)]).text()
    assert both.index("Doesn't fit v5e:2x2") < both.index("1. Does it fit?")


def test_a_step_that_nothing_alone_makes_fit_says_so() -> None:
    # 80 GiB of parameters: more than a device of any chip has left.
    huge = verdict_of(plan_of(2, 8, elements=80 * GIB), "v5e:2x4", 500.0)
    assert huge.changes == ()
    assert "No single change of these is known to be enough" in str(explanation_of(huge))


def test_verdicts_are_in_json_and_read_back() -> None:
    explanation = explanation_of(FULL)
    (found,) = json.loads(explanation.to_json())["verdicts"]
    assert found["fits"] is False
    assert found["hbm_bytes"] == 16 * GIB
    assert {change["by"] for change in found["changes"]} == {"estimate", ""}
    assert Explanation.from_json(explanation.to_json()) == explanation


def test_the_page_has_a_title_what_it_is_of_and_the_bar_of_the_memory_with_the_limit() -> None:
    told = (("command", f"spmdzero explain {BAD}"), ("date", "2026-11-26"))
    page = together([explanation_of(FITS, FULL)], told=told)
    html = page.html()
    Cells(html)
    assert not re.search(r"<(script|style|link|img|iframe)\b|\b(href|src|class)=|\burl\(", html)
    assert "<title>spmdzero explain: v5e:2x4, v5e:2x2</title>" in page.document()
    for shown in ("2026-11-26", "limit: 16 GiB", "train_batch_size"):
        assert shown in html
    # 17.5 GiB are the whole width, and the limit lies within.
    assert f"left:{100 * 16 / 17.5:.3f}%" in html
    # What is not known is said in words: no table without rows.
    assert all(len(table.split("<tr")) > 2 for table in html.split("<table")[1:])


def test_a_lone_row_is_a_row_and_no_token() -> None:
    assert ", 1 row a device and step" in str(explanation_of(FITS))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**20, "1.00 MiB"),
     (123 * 2**20, "123 MiB"), (round(22.14 * GIB), "22.1 GiB"),
     (GIB - 1, "1.00 GiB"), (3 * 2**40, "3.00 TiB")],
)  # fmt: skip
def test_bytes_are_written_with_three_digits(count: int, text: str) -> None:
    assert sized(count) == text


def test_both_of_libtpus_messages_about_too_little_memory_are_read() -> None:
    # Of libtpu 0.0.21, and of 0.0.50.1.
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.51G of 15.75G hbm."
    assert needed_by(said) == round(20.51 * 2**30)
    said = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (42.85G) exceeds available HBM (31.24G). HLO module: jit_run."
    )
    assert needed_by(said) == round(42.85 * 2**30)
    assert needed_by("RESOURCE_EXHAUSTED: of the host") is None
