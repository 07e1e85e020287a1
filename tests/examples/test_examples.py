"""The example scripts, run as a user runs them."""

import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.support.processes import run_python

pytestmark = [pytest.mark.backends("torch_xla", test_all="jax"), pytest.mark.slow]
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    return run_python(str(EXAMPLES / name), *arguments, devices=8, timeout=300, fresh=True)


def found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern!r} in:\n{text}"
    return match.groups()


@pytest.fixture(scope="module")
def gpt_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("out")
    output = run_example("train_gpt.py", "--size=tiny", "--steps=20", "--sample=4", f"--out={out}")
    return output, out / "loss.png"


def test_gpt_learns_more_than_the_uniform_guess(gpt_run: tuple[str, Path]) -> None:
    said = r"nats per byte, .*: ([\d.]+) before training, ([\d.]+) after"
    before, after = map(float, found(said, gpt_run[0]))
    # log(512) nats a token, the uniform guess, are 2.8 nats a byte: a token stands for about two.
    assert 2.5 < before < 3.2
    assert after < before - 0.25


def test_gpt_draws_a_loss_curve(gpt_run: tuple[str, Path]) -> None:
    picture = gpt_run[1]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    colours = np.unique(matplotlib.image.imread(picture).reshape(-1, 4), axis=0)
    assert len(colours) > 1
    # The first of matplotlib's line colours, in which the curve is drawn.
    assert (np.abs(colours[:, :3] - np.array([0x1F, 0x77, 0xB4]) / 255) < 0.01).all(axis=1).any()


def test_gpt_prints_a_ledger_in_which_all_serves_zero(gpt_run: tuple[str, Path]) -> None:
    assert re.search(r"^ gradient +all-reduce \+ slice ", gpt_run[0], re.MULTILINE)
    assert re.search(r"^ parameter +all-gather ", gpt_run[0], re.MULTILINE)
    assert "untagged" not in gpt_run[0]


def test_gpt_prints_measured_memory_that_is_the_planned_and_falls_with_the_stage(
    gpt_run: tuple[str, Path],
) -> None:
    rows = re.findall(r"(?:planned|measured)((?: +[\d.]+){5})", gpt_run[0])
    totals = [float(row.split()[-1]) for row in rows]
    assert len(totals) == 8
    planned, measured = totals[::2], totals[1::2]
    assert planned == measured
    assert measured[0] > measured[1] > measured[2] > measured[3]


def test_digits_cnn_reaches_97_percent() -> None:
    accuracy = found(r"test accuracy: ([\d.]+)", run_example("train_digits_cnn.py"))[0]
    assert float(accuracy) >= 0.97
