"""The scripts written for DeepSpeed, run by both libraries with one line changed."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.deepspeed import run_ranks
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("any")

SCRIPTS = Path(__file__).parents[2] / "examples" / "deepspeed_style"
OURS, THEIRS = "import spmdzero as deepspeed", "import deepspeed"
RANKS = 2
ARGUMENTS = {
    "language_model": ["--steps=12"],
    "digits": ["--epochs=2"],
    "distillation": ["--epochs=1"],
}
# Printed with six digits after the point; two frameworks sum in different orders, which after 48
# steps of these models comes to 2e-6 in the loss.
LOSS = 2e-5
NORM = 2e-4


class Step(NamedTuple):
    label: str
    loss: float
    lr: str
    norm: float


def steps(output: str) -> list[Step]:
    found = re.findall(
        r"^((?:\w+ )?step \d+) loss (\S+) lr (\S+) norm (\S+)$", output, re.MULTILINE
    )
    return [Step(label, float(loss), lr, float(norm)) for label, loss, lr, norm in found]


def run_here(name: str, *, devices: int) -> str:
    script = str(SCRIPTS / f"{name}.py")
    return run_python(script, *ARGUMENTS[name], devices=devices, timeout=300, XLA_FLAGS="")


def run_in_deepspeed(name: str, folder: Path) -> str:
    """What the first rank prints, of the same text with only its import changed."""
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines()
    assert lines.count(OURS) == 1
    changed = [THEIRS if line == OURS else line for line in lines]
    assert not any("spmdzero" in line for line in changed), "the script knows where it runs"
    (folder / f"{name}.py").write_text("\n".join(changed))
    shutil.copy(SCRIPTS / f"{name}.json", folder)
    arguments = [f"{name}.py", *ARGUMENTS[name]]
    return run_ranks(arguments, ranks=RANKS, cwd=folder, timeout=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_changing_the_import_alone_keeps_the_losses(name: str, tmp_path: Path) -> None:
    theirs = run_in_deepspeed(name, tmp_path)
    ours = run_here(name, devices=RANKS)
    expected, found = steps(theirs), steps(ours)
    assert len(expected) >= 12, theirs
    assert [(s.label, s.lr) for s in found] == [(s.label, s.lr) for s in expected]
    assert [s.loss for s in found] == pytest.approx([s.loss for s in expected], abs=LOSS)
    assert [s.norm for s in found] == pytest.approx([s.norm for s in expected], rel=NORM)
    scores = [
        [float(score) for score in re.findall(r"test accuracy ([\d.]+)", text)]
        for text in (ours, theirs)
    ]
    # One of 256 images may lie on the border between two classes.
    assert scores[0] == pytest.approx(scores[1], abs=1.01 / 256)


@pytest.mark.slow
def test_a_script_written_for_deepspeed_runs_on_eight_devices_of_one_process() -> None:
    trained = steps(run_here("digits", devices=8))
    assert trained[-1].loss < trained[0].loss / 3
