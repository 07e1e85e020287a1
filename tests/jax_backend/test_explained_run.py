"""`spmdzero run --explain`: the compiler's word on a script's own first step, on a TPU's slice."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes import environment

# Its optimizer and its accumulation are the JSON's; the loss is the model's own.
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)

    def forward(self, x):
        return (self.down(self.up(x).relu()) - x).pow(2).mean()
"""
JSON = """{
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}
}"""
SCRIPT = """
import deepspeed, torch
from net import Net

engine, *_ = deepspeed.initialize(model=Net(), config="ds.json")
for step in range(4):
    loss = engine(torch.randn(16, 128, dtype=torch.bfloat16))
    engine.backward(loss)
    print("loss", loss.item())
    engine.step()
    print("weights", engine.module.up.weight.float().abs().max().item())
print("all steps are done")
"""
# As accelerate's and torch's launchers start the process that trains.
LAUNCHER = (
    "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, 'script.py']).returncode)"
)
PLAIN = "import torch\nprint(torch.ones(2).sum().item())"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    files = {
        "net.py": NET, "ds.json": JSON, "script.py": SCRIPT, "launcher.py": LAUNCHER,
        "plain.py": PLAIN,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def spmdzero(here: Path, *words: str, status: int = 0, **variables: str) -> tuple[str, str]:
    """What `spmdzero WORDS...` prints on stdout and on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "spmdzero", *words], cwd=here, text=True, capture_output=True,
        check=False, env={**environment(), "SPMDZERO_BACKEND": "jax", **variables},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def _numbers(told: str) -> dict[str, list[str]]:
    """What stays the same from one explanation of a step to another: memory, time and traffic."""
    verdict = next(line for line in told.splitlines() if line.startswith("Fits"))
    # `explain` also tells of the CPU's program.
    told = told[told.index("\non v5e:2x2\n") :].split("\non cpu:")[0]
    moved = re.findall(r"^ (?:micro|boundary) x1 .*$", told, re.MULTILINE)
    sent = re.findall(r"a device sends .*", told)
    assert moved, told
    assert sent, told
    return {"fits": re.findall(r"[\d.]+ (?:KiB|ms)", verdict), "moved": moved, "sent": sent}


@pytest.mark.parametrize("script", ["script.py", "launcher.py"])
def test_a_scripts_step_is_that_of_its_module(here: Path, script: str) -> None:
    told, said = spmdzero(here, "run", "--explain", "v5e:2x2", script)
    # Nothing was computed: what is read of the first micro-batch is zero, and the second, which
    # ends the step, is the last.
    assert re.findall(r"loss (\S+)", told) == ["0.0"] * 2
    assert re.findall(r"weights (\S+)", told) == ["0.0"]
    assert "all steps are done" not in told
    assert (
        len(re.findall(r"script\.py:9: nothing is computed: what is read here is zero", said)) == 1
    )
    alone, _ = spmdzero(
        here, "explain", "net:Net", "ds.json", "--batch", "16x128:bfloat16", "--tpu", "v5e:2x2",
        "--own-stage",
    )  # fmt: skip
    assert _numbers(told) == _numbers(alone)


def test_a_page_is_written(here: Path) -> None:
    spmdzero(here, "run", "--explain", "v5litepod-4", "--html", "page.html", "script.py")
    assert "v5litepod-4" in (here / "page.html").read_text()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)"])
def test_a_script_that_trains_by_no_engine_is_told_so(here: Path, ending: str) -> None:
    (here / "plain.py").write_text(f"{PLAIN}\n{ending}")
    _, said = spmdzero(here, "run", "--explain", "v5e:2x2", "plain.py", status=2)
    assert "the script ended before a step of an engine" in said


def test_a_script_that_fails_ends_as_it_would(here: Path) -> None:
    (here / "script.py").write_text("raise SystemExit(7)")
    spmdzero(here, "run", "--explain", "v5e:2x2", "script.py", status=7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--explain", "v5e:2x2", "--devices", "8"], "--devices 8: v5e:2x2 has 4"),
        (["--explain", "v9:2x2"], "v9:2x2"),
        (["--html", "page.html"], "--explain names no slice"),
    ],
)
def test_what_cannot_be_explained_is_refused(here: Path, words: list[str], said: str) -> None:
    _, told = spmdzero(here, "run", *words, "script.py", status=2)
    assert said in told


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_torch_xla_explains_modules_alone(here: Path) -> None:
    _, said = spmdzero(
        here, "run", "--explain", "v5e:2x2", "script.py", status=1, SPMDZERO_BACKEND="torch_xla"
    )
    assert "a program for TPUs that aren't here is traced by JAX's backend" in said
