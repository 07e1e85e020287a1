"""`spmdzero explain`, as a shell runs it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmdzero import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.backend import current
from spmdzero.cli._arguments import load_object, made_by, make_batch
from spmdzero.cli._explain_job import _start_again
from spmdzero.explain import Explanation
from spmdzero.show import together
from tests.support.processes import environment
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 128)

    def forward(self, x, y=None):
        return self.body(x).pow(2).mean()

class Leaking(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(128)

    def forward(self, x, y=None):
        return self.norm(self.body(x).softmax(0)).pow(2).mean()

def batch():
    return {"x": torch.ones(4, 64)}
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    leaking = CONFIG | {"spmd": {"forward": "global"}}
    (tmp_path / "global.json").write_text(json.dumps(leaking))
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spmdzero", "explain", *arguments],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_json_and_page_are_of_the_devices_that_were_asked_for(folder: Path) -> None:
    arguments = (
        "net:Net", "ds.json", "--batch", "x={devices}x64", "--devices", "4",
        "--own-stage", "--json", "--html", "page.html", "--strict",
    )  # fmt: skip
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    explanation = Explanation.from_json(json.dumps(found))
    assert (explanation.devices, explanation.stage) == (4, 1)
    assert [moves.target for moves in explanation.moves] == ["cpu:4"]
    page = (folder / "page.html").read_text()
    (date,) = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d [\w+-]+", page)
    # What the explanation doesn't know: `to_html()` has no such lines.
    told = {"command": shlex.join(["spmdzero", "explain", *arguments]), "config": "ds.json"}
    expected = together([explanation], told=list({**told, "date": date}.items()))
    assert page == expected.document()


def test_strict_fails_for_what_the_audit_finds_and_json_and_page_name_it(folder: Path) -> None:
    arguments = ("-b", "net:batch", "--devices", "4", "--own-stage", "--strict")
    done = run(folder, "net:Leaking", "global.json", *arguments, "--json", "--html", "page.html")
    assert done.returncode == 1, done.stderr
    assert "problem: stray-activation-collective: " in done.stderr
    (found,) = json.loads(done.stdout)
    (finding, *_) = found["audit"]["findings"]
    assert finding["name"] == "stray-activation-collective"
    assert finding["subject"] in (folder / "page.html").read_text()


@pytest.mark.slow
def test_without_strict_findings_are_told_and_the_status_is_0(folder: Path) -> None:
    arguments = ("-b", "net:batch", "--devices", "4", "--own-stage")
    done = run(folder, "net:Leaking", "global.json", *arguments)
    assert done.returncode == 0, done.stderr
    assert "3. What is wrong?" in done.stdout
    assert "✗ stray-activation-collective" in done.stdout


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        pytest.param(
            "net:Nothing", ["-b", "8x64"], "net has no function Nothing", marks=pytest.mark.slow
        ),
        pytest.param("net:Net", ["-b", "9x64"], "9 rows", marks=pytest.mark.slow),
        pytest.param(
            *("net:Net", ["-b", "8x64", "--tpu", "v5e"], "no TPU topology"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_ends_with_one_message_and_status_2(
    folder: Path, model: str, more: list[str], expected: str
) -> None:
    done = run(folder, model, "ds.json", *more)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_is_made_of_shapes_that_have_names_or_have_none() -> None:
    batch = make_batch(["x=8x128:int64", "mask=8x128:bool", "scale=8:bfloat16"])
    assert {name: (list(t.shape), t.dtype) for name, t in batch.items()} == {
        "x": ([8, 128], torch.int64),
        "mask": ([8, 128], torch.bool),
        "scale": ([8], torch.bfloat16),
    }
    (image, label) = make_batch(["8x3x32x32", "8:int64"])
    assert (tuple(image.shape), image.dtype) == ((8, 3, 32, 32), torch.float32)
    assert (tuple(label.shape), label.dtype) == ((8,), torch.int64)


def test_what_is_no_batch_or_no_object_is_refused() -> None:
    for text in ("8xx3", "x=", "8:complex128x", "8:nn", "x=8x8"):
        with pytest.raises(SpmdZeroUsageError, match=r"write a shape|no torch dtype|name all"):
            make_batch([text, "8x8"])
    for name in ("net", "net:", "no_such_module:f", "os:no_such_function"):
        with pytest.raises(SpmdZeroUsageError, match=r"write module|No module named|no function"):
            load_object(name)


def test_a_model_that_wants_arguments_is_told_to_have_a_function_that_gives_them() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"wants arguments \(in_features, out_features\)"):
        made_by("torch.nn:Linear")
    assert isinstance(made_by("torch.nn:ReLU"), torch.nn.ReLU)
    assert made_by("collections:Counter") == {}


@pytest.mark.slow
def test_a_model_of_hugging_face_is_explained_where_torch_xla_is_installed_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's environment has no such word.
    monkeypatch.delenv("USE_TORCH_XLA", raising=False)
    done = run(
        folder, "tests.support.models:small_gpt2", "ds.json", "-b", "input_ids={devices}x32:int64",
        "-b", "labels={devices}x32:int64", "--devices", "2", "--own-stage", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert Explanation.from_json(json.dumps(found)).devices == 2


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_topologies_of_several_sizes_are_explained_at_once_on_one_page(folder: Path) -> None:
    done = run(
        folder, "net:Net", "ds.json", "--batch", "x={devices}x64", "--own-stage", "--json",
        "--html", "page.html", "--tpu", "v5e:2x2", "--tpu", "v6e:2x2", "--tpu", "v5e:2x4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    explanations = [Explanation.from_json(json.dumps(found)) for found in json.loads(done.stdout)]
    assert [[moves.target for moves in e.moves] for e in explanations] == [
        ["cpu:4", "v5e:2x2", "v6e:2x2"],
        ["cpu:8", "v5e:2x4"],
    ]
    page = (folder / "page.html").read_text()
    assert page.count("<!doctype html>") == 1
    for target in ("v5e:2x2", "v6e:2x2", "v5e:2x4"):
        assert f"on {target}" in page
    assert page.count("2. What moves?") == 2
    # Progress, on stderr as it is no terminal.
    assert "explain: stage 1, boundary program for v6e:2x2" in done.stderr


def test_a_process_that_starts_again_for_tpus_asks_the_backend_that_the_config_names(
    mesh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    own = current().name
    for name in ("torch_xla", "jax"):
        config = CONFIG | {"spmd": {"backend": name}}
        if name != own:
            # A process has one; started afresh it has none yet.
            with pytest.raises(SpmdZeroConfigError, match=f"uses {own} already"):
                _start_again(config)
        elif name == "torch_xla":
            with pytest.raises(SpmdZeroUsageError, match="traced by JAX's backend"):
                _start_again(config)
        else:
            _start_again(config)
    assert ["-m" in arguments for arguments in started] == [True] * (own == "jax")
