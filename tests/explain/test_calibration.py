"""The time of a step on the scale of measured ones: the fit, what is shown, and one's own rows."""

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spmdzero import SpmdZeroUsageError
from spmdzero._display import page_of
from spmdzero.audit import AuditReport
from spmdzero.cli._app import app
from spmdzero.explain import CLASSES, Explanation, Share, StepTime, Verdict, calibrated
from spmdzero.explain import _calibration as of
from spmdzero.show._verdict import Card
from tests.explain import calibrating
from tests.support.measured_steps import load, measured_steps, parameters

pytestmark = pytest.mark.backends("any")

TRUE = {"products": 0.8, "memory": 1.3, "kernels": 1.5, "wire": 1.2, "hidden": 0.1, "host": 1.0}
GENERATIONS = {"v5e": 1.1, "v6e": 0.9}


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests' own, in the place of whoever runs them."""
    path = tmp_path / "own.json"
    monkeypatch.setenv("SPMDZERO_CALIBRATION", str(path))
    return path


def synthetic(generations: dict[str, float] = GENERATIONS, error: float = 0.0):
    """Steps that differ in what they consist of, and take what `TRUE` says."""
    found, chance = [], random.Random(0)
    for i, (name, whole) in enumerate(itertools.product(range(10), generations.items())):
        generation, factor = whole
        # Each class is most of some step.
        classes = {c: 10.0 if j == name % len(CLASSES) else 1.0 for j, c in enumerate(CLASSES)}
        seconds = factor * sum(TRUE[c] * s for c, s in classes.items())
        off = math.exp(chance.gauss(0, error))
        row = of.MeasuredStep(
            name=f"step {i}", generation=generation, devices=8, seconds=seconds * off,
            classes=classes, group=f"model {name}", source="made up",
        )  # fmt: skip
        found.append(row)
    return found


def test_the_fit_recovers_the_factors_that_made_the_rows() -> None:
    found = of.fit(synthetic())
    # What is common to all generations may be in either factor, so the products are compared; the
    # pull towards 1 leaves some per cent.
    for (name, factor), (generation, whole) in itertools.product(TRUE.items(), GENERATIONS.items()):
        got = found.factors[name] * found.generations[generation]
        if name != "hidden":
            assert got == pytest.approx(factor * whole, rel=0.08), name
    for row in synthetic():
        assert found.seconds(row.classes, row.generation) == pytest.approx(row.seconds, rel=0.03)
    assert found.spread < 0.08


def test_no_factor_is_negative_and_what_no_row_tells_of_stays_as_it_is() -> None:
    row = synthetic()[0]
    only = dataclasses.replace(row, classes={"products": 1.0}, seconds=0.01)
    found = of.fit([only, dataclasses.replace(only, name="again", group="other")])
    assert all(factor > 0 for factor in (*found.factors.values(), *found.generations.values()))
    assert found.factors["kernels"] == found.factors["wire"] == pytest.approx(1)
    empty = of.fit([])
    assert empty.of({"products": 1.0}, "v6e") is None


def test_a_row_is_judged_by_a_fit_that_knows_neither_it_nor_its_siblings() -> None:
    rows = synthetic()
    wrong = dataclasses.replace(rows[0], seconds=rows[0].seconds * 2)
    sibling = dataclasses.replace(wrong, name="its sibling")
    told = {j.row.name: j for j in of.judged([wrong, sibling, *rows[1:]])}
    for name in (wrong.name, "its sibling"):
        assert not told[name].within
        assert told[name].seconds == pytest.approx(rows[0].seconds, rel=0.1)
        assert told[name].by == "others"
    # Of a generation that has one group alone, rows judge each other, and say so.
    few = [dataclasses.replace(row, generation="v4") for row in rows[:1]] * 2
    few = [dataclasses.replace(row, name=f"v4 {i}") for i, row in enumerate(few)]
    assert [j.by for j in of.judged([*rows, *few])][-2:] == ["siblings", "siblings"]
    # The only step of a generation is judged by other generations.
    alone = dataclasses.replace(rows[0], name="alone", generation="v4")
    assert of.judged([alone, *rows])[0].by == "other generations"


def test_the_interval_is_as_wide_as_the_errors_of_rows_left_out() -> None:
    exact, off = of.fit(synthetic()), of.fit(synthetic(error=0.2))
    assert off.spread > 0.15 > exact.spread
    assert of.quantile([0.1, -0.3, 0.2, 0.05]) == 0.3
    # Of few rows no such rank exists.
    assert of.quantile([0.1, -0.3]) == 0.4
    assert of.quantile([0.1, -0.6]) == 0.6


def test_a_generation_without_rows_has_no_calibrated_time() -> None:
    classes = {"products": 1.0}
    assert calibrated(classes, "v4") is None
    found = calibrated(classes, "v6e")
    assert found is not None
    assert found.low < found.seconds < found.high
    assert found.rows > 0


# What the package ships


def test_the_shipped_calibration_is_the_fit_to_the_measured_steps() -> None:
    shipped, found = of.read(of.SHIPPED), of.fit(measured_steps())
    assert [row.name for row in shipped.rows] == [row.name for row in found.rows]
    assert shipped.factors == pytest.approx(found.factors, abs=1e-3)
    assert shipped.generations == pytest.approx(found.generations, abs=1e-3)
    assert shipped.spread == pytest.approx(found.spread, abs=1e-3)


def test_the_table_on_the_page_is_what_leaving_each_row_out_gives() -> None:
    table = calibrating.TABLE.search(calibrating.PAGE.read_text())
    assert table is not None
    assert table[0] == "\n".join(calibrating.lines(of.read(of.SHIPPED))) + "\n", "make calibration"


def test_each_measured_step_has_a_source_and_a_program() -> None:
    told = load()
    names = [row["name"] + row["topology"] for row in told["rows"]]
    assert len(names) == len(set(names)) >= 15
    for row in told["rows"]:
        assert row["source"].startswith("https://github.com/"), row["name"]
        assert row["said"], row["name"]
        assert row["program"] in told["programs"]
    for program in told["programs"].values():
        assert set(program["flags"]) <= set(told["flags"])


def test_the_decoders_have_the_parameters_that_their_names_say() -> None:
    for name, program in load()["programs"].items():
        billions = next(int(w[:-1]) for w in name.split("-") if w[:-1].isdigit() and w[-1] == "b")
        assert parameters(program["recipe"]) / 1e9 == pytest.approx(billions, rel=0.25), name


# What is shown


def a_time(target: str = "v6e:2x4", seconds: float = 3.0) -> StepTime:
    kinds = (Share(name="matmul", seconds=seconds, operations=1),)
    return StepTime(
        target=target, cycles=1, clock=1e9, compiled=seconds, kernels=0.5, wire=0.3, exposed=0.2,
        flops=1e15, peak_flops=918e12, kinds=kinds, modules=(), dearest=(), uncounted=0,
    )  # fmt: skip


def an_explanation(*times: StepTime) -> Explanation:
    return Explanation(
        stage=2, mesh="fsdp=8", devices=8, accumulation=1, tokens=1024, xla_flags=(), fits=(),
        paper_note="", moves=(), audit=AuditReport(findings=(), steps=0, programs=()), rooflines=(),
        times=times, model="Net, 1 parameter",
    )  # fmt: skip


def card(time: StepTime) -> Card:
    verdict = Verdict(
        target=time.target, stage=2, fits=True, peak=2**30, hbm_bytes=2**35, parameters=1,
        states=1, gradients=1, rest=1,
    )  # fmt: skip
    return Card(verdict=verdict, time=time, work=(8192, "token"), devices=8, problems=0)


def test_the_interval_stands_beside_the_estimate_in_text_html_and_json() -> None:
    time = a_time()
    found = time.calibrated
    assert found is not None
    assert time.classes["products"] == 3.0
    assert sum(time.classes.values()) - time.classes["hidden"] == pytest.approx(time.seconds)
    low, high = (f"{1e3 * s:,.3f} ms" for s in (found.low, found.high))
    page = page_of(time)
    for shown in (page.text(), page.document()):
        assert f"{low} to {high}" in shown
        assert f"{found.rows} of them on such chips" in shown
    short = f"calibrated {1e3 * found.seconds:,.0f} ({1e3 * found.low:,.0f} to "
    assert short in card(time).text()
    assert short in card(time).html()
    explanation = an_explanation(time)
    read = json.loads(explanation.to_json())["times"][0]["calibrated"]
    assert read["low"] == pytest.approx(found.low)
    assert Explanation.from_json(explanation.to_json()) == explanation


def test_a_generation_without_rows_says_so() -> None:
    time = a_time("v4:2x2x2")
    assert time.calibrated is None
    assert "no step was measured on such a chip" in page_of(time).text()
    assert "calibrated" not in card(time).text()


def test_a_step_of_less_than_ten_milliseconds_is_not_calibrated() -> None:
    short = dataclasses.replace(a_time(seconds=1e-3), kernels=0.0, exposed=0.0)
    assert short.calibrated is None
    assert "shorter than 10 ms" in page_of(short).text()


def test_a_step_that_is_shorter_than_all_measured_ones_says_so() -> None:
    short = dataclasses.replace(a_time(seconds=0.02), kernels=0.0, exposed=0.0)
    assert "shorter than any measured step" in page_of(short).text()
    assert "shorter" not in page_of(a_time(seconds=3.0)).text()


# One's own measured steps


def run(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["calibrate", *words])
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def explained(tmp_path: Path) -> Path:
    path = tmp_path / "explanation.json"
    path.write_text(an_explanation(a_time()).to_json())
    return path


def test_a_step_of_ones_own_changes_the_fit_and_what_explain_says(
    explained: Path, own_file: Path
) -> None:
    before = a_time().calibrated
    shipped = of.SHIPPED.read_text()
    said = run("--add", str(explained), "--took", "5.5s", "--name", "my own")
    assert "my own" in said
    assert own_file.is_file()
    assert of.SHIPPED.read_text() == shipped
    after = a_time().calibrated
    assert before is not None
    assert after is not None
    assert after.seconds > before.seconds
    assert after.rows == before.rows + 1
    # Measured again, it takes the place of what was measured before.
    run("--add", str(explained), "--took", "3.6s", "--name", "my own")
    again = a_time().calibrated
    assert again is not None
    assert again.rows == after.rows
    assert again.seconds < after.seconds
    run("--remove", "my own")
    back = a_time().calibrated
    assert back is not None
    assert back.seconds == pytest.approx(before.seconds, rel=1e-3)


def test_a_generation_without_rows_gets_a_time_from_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "v4.json"
    path.write_text(an_explanation(a_time("v4:2x2x2"), a_time("v6e:2x4")).to_json())
    assert "Name one by --tpu" in run("--add", str(path), "--took", "4s", status=2)
    run("--add", str(path), "--took", "4s", "--tpu", "v4:2x2x2")
    found = a_time("v4:2x2x2").calibrated
    assert found is not None
    assert found.rows == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--took", "3s"], "both"),
        (["--add", "nothing.json", "--took", "3s"], "No such file"),
        (["--add", "{explained}", "--took", "3"], "is no time"),
        (["--add", "{explained}", "--took", "3ms"], "it is not the same step"),
        (["--remove", "Llama"], "your own measured steps are: none"),
    ],
)
def test_what_is_wrong_is_said(explained: Path, words: list[str], said: str) -> None:
    assert said in run(*(word.format(explained=explained) for word in words), status=2)


def test_a_file_that_is_no_calibration_is_named(own_file: Path) -> None:
    own_file.write_text("{}")
    with pytest.raises(SpmdZeroUsageError, match=r"own\.json is no calibration"):
        calibrated({}, "v6e")


def test_without_a_step_it_shows_the_table() -> None:
    said = run()
    for row in of.read(of.SHIPPED).rows:
        assert row.name[:20] in said
    assert "no measured step: v4" in said
