"""The pure parts of tests/benchmarks/, and one small run of it. Nothing here asserts a time."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The benchmark is a script, not an installed package.
sys.path.insert(0, str(BENCHMARKS))

import step_time  # noqa: E402
from harness import report, workload  # noqa: E402
from harness.candidates import ANNOTATED, DEEPSPEED, EXPLICIT, GLOBAL, candidates_for  # noqa: E402
from harness.launch import CandidateFailedError, launch  # noqa: E402
from harness.worker import Run  # noqa: E402
from harness.workload import Workload  # noqa: E402

from spmdzero.config import load_config, resolve_batch_sizes  # noqa: E402


def run_of(steps: list[float], *, host: float = 0.0, losses: tuple[float, ...] = (2.0, 1.0)) -> Run:
    """A run whose timed steps took `steps` seconds, `host` of each on the host."""
    return Run(
        step_seconds=steps,
        host_seconds=[host for _ in steps],
        warm_up_seconds=[5.0, 1.0],
        losses=list(losses),
    )


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def workload_of(**changes: Any) -> Workload:
    usual = Workload(model="gpt", devices=2, dtype="fp32", stage=2, steps=1)
    return dataclasses.replace(usual, **changes)


# -- the command line -----------------------------------------------------------------------


def test_the_defaults_are_the_run_that_the_docs_quote():
    args = step_time.parse([])
    assert (args.model, args.devices, args.steps, args.dtype, args.stage) == (
        "gpt", 2, 10, "fp32", 2,
    )  # fmt: skip
    assert (args.what, args.out) == ("step", None)


def test_every_option_is_taken():
    line = "--model cnn --devices 4 --steps 3 --rounds 2 --dtype bf16 --stage 1 --what host --out x"
    args = step_time.parse(line.split())
    assert (args.model, args.devices, args.steps, args.rounds) == ("cnn", 4, 3, 2)
    assert (args.dtype, args.stage, args.what, args.out) == ("bf16", 1, "host", Path("x"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--devices 3", "does not divide the 16 rows"),
        ("--steps 0", "0 is below 1"),
        ("--rounds -1", "-1 is below 1"),
        ("--stage 3", "invalid choice"),
        ("--model bert", "invalid choice"),
    ],
)
def test_a_wrong_option_ends_with_a_reason(line, complaint, capsys):
    with pytest.raises(SystemExit):
        step_time.parse(line.split())
    assert complaint in capsys.readouterr().err


# -- who takes part -------------------------------------------------------------------------


@pytest.mark.parametrize("found", [True, False])
def test_deepspeed_takes_part_where_it_is_installed(found, monkeypatch):
    spec = SimpleNamespace() if found else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    peer = [DEEPSPEED] if found else []
    assert candidates_for("step") == [GLOBAL, ANNOTATED, EXPLICIT, *peer]


def test_the_host_comparison_is_about_the_annotated_region():
    assert candidates_for("host") == [ANNOTATED]


# -- the workload ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("candidate", [GLOBAL, ANNOTATED, EXPLICIT], ids=lambda c: c.name)
def test_the_global_batch_does_not_depend_on_the_devices(candidate, devices):
    work = workload_of(devices=devices, dtype="bf16", stage=1)
    config = load_config(work.config() | {"spmd": candidate.spmd})
    assert resolve_batch_sizes(config, dp_world_size=devices).train == workload.GLOBAL_BATCH
    assert config.bf16.enabled
    assert config.zero_optimization.stage == 1


def test_the_gpt_has_three_to_four_million_parameters():
    assert 3e6 < sum(p.numel() for p in workload_of().build().parameters()) < 4e6


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_two_processes_would_train_the_same_weights_on_the_same_data(model):
    first, second = workload_of(model=model), workload_of(model=model, devices=8)
    pairs = zip(first.build().parameters(), second.build().parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)
    for a, b in zip(first.batch(3), second.batch(3), strict=True):
        assert a.equal(b)
    assert not first.batch(3)[0].equal(first.batch(4)[0])


# -- numbers and tables ---------------------------------------------------------------------


def test_the_ratio_is_the_median_over_the_first_candidates_median():
    runs = {
        "global": [run_of([2.0, 2.0, 9.0])],
        "region": [run_of([1.0, 1.0, 1.0]), run_of([1.0, 1.5, 30.0])],
    }
    titles, _, first, second = rows_of(report.step_table(runs))
    ratio, median = titles.index("ratio"), titles.index("s/step")
    assert (first[median], first[ratio]) == ("2.000", "1.00")
    assert (second[median], second[ratio]) == ("1.000", "0.50")
    assert second[titles.index("medians of rounds")] == "1.000 to 1.500"


def test_compile_time_is_what_the_warm_up_took_beyond_usual_steps():
    assert run_of([0.5, 0.5]).compile_seconds == pytest.approx(5.0 + 1.0 - 2 * 0.5)
    assert run_of([4.0]).compile_seconds == 0.0


def test_the_table_shows_first_and_last_loss():
    titles, _, row = rows_of(report.step_table({"a": [run_of([1.0], losses=(3.0, 9.0, 2.5))]}))
    assert row[titles.index("first loss")] == "3.00000"
    assert row[titles.index("last loss")] == "2.50000"


def test_the_host_table_splits_a_step():
    titles, _, row = rows_of(report.host_table({"a": [run_of([0.4, 0.4], host=0.1)]}))
    shown = dict(zip(titles, row, strict=True))
    assert (shown["host s"], shown["device s"], shown["s/step"]) == ("0.100", "0.300", "0.400")


def test_losses_are_compared_at_every_step_and_in_every_round():
    good = run_of([1.0], losses=(3.0, 2.0, 1.0))
    middle = run_of([1.0], losses=(3.0, 2.5, 1.0))
    assert report.loss_difference({"a": [good], "b": [good, middle]}) == 0.5


@pytest.mark.parametrize("broken", [0, 1], ids=["first candidate", "second candidate"])
def test_a_nan_loss_is_a_difference(broken):
    runs = [run_of([1.0], losses=(2.0, float("nan"))), run_of([1.0], losses=(2.0, 1.0))]
    difference = report.loss_difference({"a": [runs[broken]], "b": [runs[1 - broken]]})
    assert step_time.verdict("fp32", difference) is not None


def test_losses_apart_fail_the_benchmark_in_fp32_only():
    assert step_time.verdict("fp32", 9e-4) is None
    assert "did not do the same work" in str(step_time.verdict("fp32", 1.1e-3))
    assert step_time.verdict("bf16", 1.1e-3) is None


def test_rounds_that_differ_are_called_noise():
    assert report.noise_note({"a": [run_of([1.0]), run_of([1.05])]}) is None
    note = report.noise_note({"a": [run_of([1.0])], "b": [run_of([1.0]), run_of([2.0])]})
    assert "'b' are 67% apart" in str(note)


def test_the_report_names_command_versions_and_cpus():
    args = step_time.parse(["--stage", "1"])
    text = step_time.render(args, {"a": [run_of([1.0])]}, command="python step_time.py --stage 1")
    header, _, rest = text.partition("\n\n")
    assert "`python step_time.py --stage 1`" in header
    assert report.versions() in header
    assert " CPUs (" in header
    assert "gpt, fp32, stage 1, 2 devices, 16 rows a step" in header
    assert rest.startswith("| candidate |")


# -- real processes -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_fails_shows_the_end_of_its_output():
    with pytest.raises(CandidateFailedError, match=r"annotated, process 0: 1\n(.|\n)*stage = 3"):
        launch(workload_of(stage=3), ANNOTATED)


@pytest.mark.slow
def test_one_small_run_prints_every_candidate_and_equal_losses(tmp_path):
    out = tmp_path / "result.md"
    line = f"--model cnn --steps 1 --rounds 1 --out {out}"
    command = [sys.executable, str(BENCHMARKS / "step_time.py"), *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text()
    table = done.stdout.split("\n\n")[1]
    assert [row[0] for row in rows_of(table)[2:]] == [c.name for c in candidates_for("step")]
