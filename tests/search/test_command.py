"""`spmdzero plan`, as a shell runs it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spmdzero import SpmdZeroUsageError, TrainingPlan
from spmdzero.cli._plan import _prices
from tests.support.processes import environment
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.backends("jax")

COMMAND = [sys.executable, "-m", "spmdzero", "plan", "tests.search.models:Net"]
BATCH = ["--batch", "32x64:int64"]


# 4.3 billion parameters with 16 bytes of states each: 16 GiB of each of 4 chips, 8 of 8.
WIDE = """
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(16)))

    def forward(self, x):
        return self.layers(x).square().mean()
"""


def command(folder: Path, *arguments: str) -> list[str]:
    config = folder / "ds.json"
    config.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    return [*COMMAND, str(config), *arguments]


def ran(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(folder, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=900,
        env=environment(PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(folder)), check=False,
    )  # fmt: skip


def test_a_price_is_a_generation_and_a_number() -> None:
    assert _prices(["v6e=2.7", "v5e=1.2"]) == {"v6e": 2.7, "v5e": 1.2}
    for wrong in ("v6e", "v6e=", "v6e=-1", "=3", "v6e=cheap"):
        with pytest.raises(SpmdZeroUsageError, match=r"--price .*such as v6e=2\.7"):
            _prices([wrong])


@pytest.mark.slow
def test_the_command_says_in_words_what_can_not_be(tmp_path: Path) -> None:
    done = ran(tmp_path, *BATCH, "--tpu", "v5e:2x4", "--price", "v6e=2.7")
    assert done.returncode == 2
    assert "no --tpu is of this generation, only v5e" in done.stderr
    done = ran(tmp_path, "--batch", "7x64:int64", "--tpu", "v5e:4x4")
    assert done.returncode == 2
    assert "7 rows can't be divided over the 16 devices" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_goes_on_to_the_slice_where_something_fits(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"offload_optimizer": {"device": "none"}}}')
    done = subprocess.run(
        [*COMMAND[:-1], "wide:Wide", str(config), "--batch", "16x16384", "--tpu", "v5e:2x2",
         "--programs", "1", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
        env=environment(PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(tmp_path)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (TrainingPlan.from_json(json.dumps(plan)) for plan in json.loads(done.stdout))
    assert (first.slice, first.best) == ("v5e:2x2", None)
    assert second.slice == first.larger == "v5e:2x4"
    assert second.best is not None


@pytest.mark.slow
def test_ctrl_c_ends_it_with_the_best_so_far(tmp_path: Path) -> None:
    arguments = command(tmp_path, *BATCH, "--tpu", "v5e:2x4", "--programs", "8", "--json")
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(tmp_path)),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "the best so far" in line:
            process.send_signal(signal.SIGINT)
            break
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    (plan,) = (TrainingPlan.from_json(json.dumps(found)) for found in json.loads(said))
    assert plan.best is not None
    assert "interrupted" in " ".join(plan.funnel)
