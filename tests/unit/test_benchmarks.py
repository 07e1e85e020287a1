"""The pure parts of tests/benchmarks/, and one small run of it. Nothing here asserts a time."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.backends("any")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The benchmark is a script, not an installed package.
sys.path.insert(0, str(BENCHMARKS))

import matrix_products  # noqa: E402
import run  # noqa: E402
from harness import candidates, report, workload  # noqa: E402
from harness.candidates import Candidate, ours  # noqa: E402
from harness.launch import launch, launch_alone  # noqa: E402
from harness.processes import ProcessFailedError  # noqa: E402
from harness.protocol import Run  # noqa: E402
from harness.scale import Scale  # noqa: E402
from harness.workload import Workload  # noqa: E402
from peers.config import deepspeed_config  # noqa: E402

from spmdzero.config import load_config, resolve_batch_sizes  # noqa: E402
from tests.support.selected import outside  # noqa: E402


def run_of(steps: list[float], *, losses: tuple[float, ...] = (2.0, 1.0), **changes: Any) -> Run:
    usual = Run(
        init_seconds=0.5,
        warm_up_seconds=[5.0, 1.0],
        step_seconds=steps,
        host_seconds=[0.1 for _ in steps],
        losses=list(losses),
        wire_bytes=2_500_000,
        peak_rss=3 * 2**20,
    )
    return dataclasses.replace(usual, **changes)


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def cells_of(table: str, row: int) -> dict[str, str]:
    titles, _, *rows = rows_of(table)
    return dict(zip(titles, rows[row], strict=True))


def workload_of(**changes: Any) -> Workload:
    return dataclasses.replace(Workload(model="gpt-tiny", devices=2, steps=1), **changes)


# -- the workload ---------------------------------------------------------------------------


def test_the_global_batch_does_not_depend_on_the_devices() -> None:
    for devices in (1, 2, 4, 8):
        config = load_config(deepspeed_config(workload_of(devices=devices), stage=1))
        assert resolve_batch_sizes(config, dp_world_size=devices).train == workload.ROWS
        assert config.zero_optimization.stage == 1


def test_a_model_has_the_size_of_its_name() -> None:
    sizes = {"gpt-1m": 0.94, "gpt-10m": 9.7, "gpt-23m": 23.2, "gpt-85m": 86.7, "cnn": 0.4}
    for model, millions in sizes.items():
        built = workload_of(model=model).build_on_meta()
        # To a tenth of a million, as the page prints it.
        assert sum(p.numel() for p in built.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_two_processes_would_train_the_same_weights_on_the_same_data() -> None:
    for model in ("gpt-tiny", "cnn"):
        first, second = workload_of(model=model), workload_of(model=model, devices=8)
        pairs = zip(first.build().parameters(), second.build().parameters(), strict=True)
        assert all(a.equal(b) for a, b in pairs)
        for a, b in zip(first.batch(3), second.batch(3), strict=True):
            assert a.equal(b)
        assert not first.batch(3)[0].equal(first.batch(4)[0])


def test_the_operations_of_a_matrix_product_are_those_that_torch_counts() -> None:
    for devices in (1, 2):
        for product in matrix_products.products_of(workload.SIZES["gpt-1m"], devices).values():
            with FlopCounterMode(display=False) as counter:
                product(torch.zeros(product.left), torch.zeros(product.right))
            assert product.operations == counter.get_total_flops()


# -- numbers and tables ---------------------------------------------------------------------


def test_the_ratio_is_the_median_over_the_first_candidates_median() -> None:
    runs = {
        "ours": [run_of([2.0, 2.0, 9.0])],
        "peer": [run_of([1.0, 1.0, 1.0]), run_of([1.0, 1.5, 30.0])],
    }
    table = report.peer_table(runs)
    assert (cells_of(table, 0)["s/step"], cells_of(table, 0)["ratio"]) == ("2.000", "1.00")
    assert (cells_of(table, 1)["s/step"], cells_of(table, 1)["ratio"]) == ("1.000", "0.50")
    assert cells_of(table, 1)["rounds"] == "1.000 to 1.500"


def test_the_table_has_every_measured_column() -> None:
    cells = cells_of(report.peer_table({"a": [run_of([0.5, 0.5], losses=(3.0, 9.0, 2.5))]}), 0)
    assert cells["host ms"] == "100.0"
    assert cells["compile s"] == "5.0"
    assert (cells["init s"], cells["wire MB"], cells["peak MiB"]) == ("0.50", "2.5", "3")
    assert cells["last loss"] == "2.50000"
    # An eager peer's host time is all of it.
    eager = report.peer_table({"a": [run_of([0.5], host_seconds=[])]})
    assert cells_of(eager, 0)["host ms"] == "all"
    # What the warm-up took beyond usual steps.
    assert run_of([0.5, 0.5]).compile_seconds == pytest.approx(5.0 + 1.0 - 2 * 0.5)
    assert run_of([4.0]).compile_seconds == 0.0


def test_a_peer_that_fails_stays_in_the_table_with_its_reason() -> None:
    failed = ProcessFailedError("exit status 1", "Traceback\n  ...\nRuntimeError: no rank 1\n\n")
    runs = {"ours": [run_of([1.0])], "peer": [failed]}
    assert rows_of(report.peer_table(runs))[3][:2] == ["peer", "failed"]
    assert "peer failed: `exit status 1: RuntimeError: no rank 1`" in report.remarks(runs)
    series = report.series_table({"1": runs, "2": {"ours": runs["ours"]}}, title="devices")
    assert rows_of(series)[2:] == [["ours", "1.000", "1.000"], ["peer", "failed", "failed"]]


def test_losses_are_compared_at_every_step_and_in_every_round() -> None:
    good = run_of([1.0], losses=(3.0, 2.0, 1.0))
    middle = run_of([1.0], losses=(3.0, 2.5, 1.0))
    runs = {"a": [good], "b": [good, middle]}
    assert report.loss_difference(runs) == 0.5
    assert "**The peers did not do the same work.**" in report.remarks(runs)
    assert not any("same work" in line for line in report.remarks({"a": [good]}))
    broken = run_of([1.0], losses=(3.0, 2.0, float("nan")))
    for runs in ({"a": [good], "b": [broken]}, {"a": [broken], "b": [good]}):
        assert "**The peers did not do the same work.**" in report.remarks(runs)


def test_rounds_that_differ_are_called_noise() -> None:
    assert report.noise_note({"a": [run_of([1.0]), run_of([1.05])]}) is None
    note = report.noise_note({"a": [run_of([1.0])], "b": [run_of([1.0]), run_of([2.0])]})
    assert "'b' are 67% apart" in str(note)


# -- real processes -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_fails_says_why() -> None:
    failure = launch(workload_of(), ours("stage 4", stage=4))
    assert isinstance(failure, ProcessFailedError)
    assert "stage = 4" in failure.headline
    failure = launch(workload_of(), Candidate(name="none", peer="nobody", ranks=True))
    assert isinstance(failure, ProcessFailedError)
    assert "No module named 'peers.nobody'" in failure.headline


@pytest.mark.slow
def test_both_ways_to_multiply_matrices_find_the_same() -> None:
    order = {"model": "gpt-1m", "repeats": 1, "xnnpack": False}
    answer = launch_alone("matrix_products", devices=2, **order)
    for name, found in answer.items():
        # fp32 in another order of summation.
        assert found["difference"] < 1e-5, name
        assert found["torch"] > 0, name
        assert found["xla"] > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("client", ["trainer", "accelerate"])
def test_a_clients_loop_is_folded_and_compiles_nothing_after_its_third_step(client: str) -> None:
    # Long enough for a line of the log.
    found = launch_alone(
        "clients", devices=2, backend="jax", client=client, model="gpt-tiny", steps=8
    )
    assert found["why"] is None
    assert (found["client"]["compiled"], found["bare"]["compiled"]) == (0, 0)


TINY = Scale(
    middle="gpt-tiny", wide="gpt-tiny", large="gpt-tiny",
    steps=1, wide_steps=1, large_steps=1, rounds=1,
    fewer=(candidates.ZERO_2,), stage_3=(candidates.ZERO_3, candidates.ZERO_2),
    series=(candidates.ZERO_2,), counts=(2, 8), accumulation=2,
    tpu_size="tiny", tpu_cases=("gpt2",),
    tpu_topologies=("v5e:2x4",), tpu_rows=("ours", "jax-scan"),
)  # fmt: skip
# Those that run a script of their own.
SAMPLE = {"A step on a TPU", "Where the time goes", "Stage 1 over stage 0, with micro-batches"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=outside(SAMPLE, title))
        for title in run.SECTIONS
        if title != "A GPT of 10 M parameters"
    ],
)
def test_no_section_of_a_tiny_run_fails(title: str) -> None:
    lines = "\n".join(run.SECTIONS[title](TINY)).splitlines()
    assert sum(line.startswith("|") for line in lines) > 2
    assert not [line for line in lines if "failed" in line or "same work" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "everybody",
    [
        (candidates.ZERO_2, candidates.DEEPSPEED_2, candidates.JAX),
        pytest.param(candidates.ALL, marks=pytest.mark.slow),
    ],
    ids=["three", "all"],
)
def test_the_table_of_a_tiny_run_has_every_peer_and_they_agree(
    everybody: tuple[Candidate, ...],
) -> None:
    tiny = dataclasses.replace(TINY, everybody=everybody)
    lines = "\n".join(run.SECTIONS["A GPT of 10 M parameters"](tiny)).splitlines()
    assert not [line for line in lines if "failed" in line or "same work" in line]
    table = "\n".join(line for line in lines if line.startswith("|"))
    assert [row[0] for row in rows_of(table)[2:]] == [c.name for c in everybody]
    wire = [float(cells_of(table, i)["wire MB"]) for i in range(len(everybody))]
    assert all(megabytes > 0.05 for megabytes in wire)


def test_a_section_alone_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter(["one", "two", "three"])
    sections = dict.fromkeys(["First", "Second"], lambda _: [next(measured)])
    monkeypatch.setattr(run, "SECTIONS", sections)
    monkeypatch.setattr(run.os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    page = tmp_path / "page.md"
    run.write(page, Scale())
    before = page.read_text()
    assert "## First\n\none\n\nMeasured on 20" in before
    assert "in 0.0 minutes, on " in before
    assert "load 0.5 at the start." in before
    run.write(page, Scale(), only=["First"])
    assert page.read_text() == before.replace("\n\none\n", "\n\nthree\n")


def test_a_section_that_fails_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def section(_: Scale) -> Iterator[str]:
        yield "a table"
        raise ProcessFailedError("exit status 1", "RuntimeError: no rank 1")

    monkeypatch.setattr(run, "SECTIONS", {"Only": section})
    run.write(tmp_path / "page.md", Scale())
    written = (tmp_path / "page.md").read_text()
    assert "## Only\n\na table\nfailed: `exit status 1: RuntimeError: no rank 1`" in written
    # The words of the page are those of docs/benchmarks.md.
    assert "## How it is measured\n\nEvery peer trains the same model" in written


def test_sections_of_another_machine_are_not_put_beside_each_other(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n\n- Python 2.7\n\n## Host time\n\nlong\n")
    with pytest.raises(SystemExit, match="was measured elsewhere"):
        run.write(page, Scale(), only=["Host time"])
    assert "long" in page.read_text()
