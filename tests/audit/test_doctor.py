"""The doctor: what it says of this machine, and of what an engine has trained."""

import functools
import json
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import spmdzero
from spmdzero.audit import Diagnosis
from spmdzero.backend import current
from spmdzero.cli import app
from tests.audit.models import (
    GLOBAL,
    AnyWidth,
    ReadsValue,
    RunsOnCpu,
    Sound,
    batches,
    config,
    engine_of,
)
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


def train(engine: spmdzero.Engine, data: list[torch.Tensor]) -> Diagnosis:
    for x in data:
        engine.backward(engine(x))
        engine.step()
    return engine.doctor()


def problems(diagnosis: Diagnosis) -> set[str]:
    # Fallbacks are counted for the whole process, so another test's show here too.
    return {check.name for check in diagnosis.problems} - {"CPU fallback"}


def test_a_sound_engine_has_no_problem() -> None:
    diagnosis = train(engine_of(Sound(hidden=56), config(gas=2)), batches(6))
    assert problems(diagnosis) == set()
    (memory,) = diagnosis.of("device memory")
    assert "moment" in memory.said
    (reads,) = diagnosis.of("host reads")
    assert reads.said.startswith("0 per step")


def test_what_recompiled_is_told_with_its_input() -> None:
    data = [x[:, :width] for x, width in zip(batches(3), (64, 64, 40), strict=True)]
    diagnosis = train(engine_of(AnyWidth(hidden=104), config()), data)
    (check,) = diagnosis.of("recompilation")
    assert "input 'x': float32[8, 64] -> float32[8, 40]" in check.said


def test_reads_per_step_count_the_scripts_and_not_the_engines() -> None:
    quiet = engine_of(Sound(), config(spmd={"check_finite": True}))
    (reads,) = train(quiet, batches(3)).of("host reads")
    assert reads.status == "ok"
    assert re.match(r"0 per step by the script and the model, \d\.?\d* by the engine", reads.said)
    engine = engine_of(ReadsValue(), config())
    (reads,) = train(engine, batches(3)).of("host reads")
    assert reads.status == "warning"
    # The engine asks now and then what the devices have found.
    assert reads.said.startswith("1 per step by the script and the model, ")
    for _ in range(3):
        engine.get_global_grad_norm()
    (reads,) = engine.doctor().of("host reads")
    assert reads.said.startswith("2 per step by the script and the model, ")


@pytest.mark.backends("torch_xla")  # JAX lowers an operation or refuses it, in words.
def test_a_fallback_is_told_by_its_operation() -> None:
    diagnosis = train(engine_of(RunsOnCpu(), config(**GLOBAL)), batches(1))
    said = [check.said for check in diagnosis.of("CPU fallback")]
    assert any(line.startswith("aten::i0 ran on the CPU") for line in said)


def test_the_machine_is_described_without_an_engine(mesh: object) -> None:
    diagnosis = spmdzero.doctor()
    (versions,) = diagnosis.of("versions")
    assert f"torch {metadata.version('torch')}" in versions.said
    name = current().name
    assert f", {name} {metadata.version(name)}" in versions.said
    assert [check.said for check in diagnosis.of("devices")] == ["8 CPU devices"]
    (memory,) = diagnosis.of("host memory")
    assert "GiB free" in memory.said
    assert json.loads(diagnosis.to_json())["checks"][1]["name"] == "versions"
    (backend,) = diagnosis.of("backend")
    assert backend.said.startswith(f"{name} (")


def test_what_compiles_for_tpus_is_told_where_it_is_missing(
    mesh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "libtpu":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    (note,) = spmdzero.doctor().of("TPU compiler")
    assert (note.status, note.said.partition(" ")[0]) == ("note", "libtpu")
    assert note.fix == "pip install 'jax[tpu]', with JAX's backend"


def test_variables_for_debugging_make_torch_xla_slow_and_mean_nothing_to_jax(
    mesh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_IR_DEBUG", "1")
    said = [check.said for check in spmdzero.doctor().problems if check.name == "flags"]
    assert ["XLA_IR_DEBUG" in line for line in said] == [True] * (current().name == "torch_xla")
    monkeypatch.setenv("XLA_IR_DEBUG", "0")
    assert "flags" not in problems(spmdzero.doctor())


def test_the_command_prints_json_writes_a_page_and_exits_with_1_under_strict_if_there_is_a_problem(
    tmp_path: Path,
) -> None:
    # A variable of torch_xla's, which to JAX is none.
    run = functools.partial(CliRunner().invoke, app, env={"XLA_IR_DEBUG": "1"})
    done = run(["doctor", "--json"])
    assert done.exit_code == 0
    assert {check["name"] for check in json.loads(done.stdout)["checks"]} >= {"versions", "devices"}
    page = tmp_path / "page.html"
    status = 1 if current().name == "torch_xla" else 0
    assert run(["doctor", "--strict", "--html", str(page)]).exit_code == status
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_a_single_cpu_device_is_told_how_to_become_several() -> None:
    said = run_python("-c", "import spmdzero; print(spmdzero.doctor())", devices=1)
    assert "1 CPU device" in said
    assert "spmdzero run --devices 8" in said
