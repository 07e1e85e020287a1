"""Trains for a while, saves asynchronously, dies at random, resumes on other device counts.

`make soak` (30 minutes), or `python -m tests.checkpoint.test_soak --minutes 3 --plot out/soak.png`.

The undisturbed run that its losses are compared with is made afterwards, on 8 devices.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.formats import latest_tag
from tests.checkpoint.runs import WIDTH, dataset
from tests.support.processes import environment

TOLERANCE = 1e-3
"""Sums over other numbers of devices differ in their last fp32 bits, which AdamW carries on over
thousands of steps; a lost or repeated step moves the loss by percents."""
ROOT = Path(__file__).resolve().parents[2]
SAMPLES, BATCH, EVERY = 160, 16, 5
DEVICES = (8, 4, 2, 1)
STAGES = 4
RESTS = ("cpu", "none")


class Smooth(nn.Module):
    """No dropout, whose masks belong to a number of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(torch.tanh(self.body(x))).squeeze(-1), y)


def work(folder: Path, log: Path, steps: int, pause: float, stage: int, device: str) -> None:
    """Resumes what is in the folder, and trains up to `steps`; notes each loss as it comes.

    Masters and moments rest where `device` says, as in `offload_optimizer`.
    Of several hosts the first one does; one that doesn't answer is given up after 10 seconds.
    """
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(
        model=Smooth(),
        training_data=dataset(SAMPLES),
        config={
            "train_batch_size": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": {"device": device},
            },
            "spmd": {"min_shard_elements": 64, "timeout": 10},
            "checkpoint": {"async": True, "keep_last": 3, "keep_every": 100},
        },
    )
    engine.load_checkpoint(folder)
    shown = log if spmdzero.comm.get_rank() == 0 else Path(os.devnull)
    with shown.open("a") as notes:
        print(json.dumps({"resumed": engine.global_steps}), file=notes, flush=True)
        while engine.global_steps < steps:
            loss = engine.train_batch().item()
            said = {"step": engine.global_steps, "loss": loss, "devices": engine.mesh.size}
            print(json.dumps(said), file=notes, flush=True)
            if engine.global_steps % EVERY == 0:
                engine.save_checkpoint(folder)
            time.sleep(pause)
    engine.wait_checkpoint()


def started(devices: int, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.test_soak", "--work", *map(str, arguments)],
        cwd=ROOT,
        env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices)),
        stdout=subprocess.DEVNULL,
    )


def notes_in(log: Path) -> list[dict[str, Any]]:
    """What workers noted; a line that a kill cut short is left out."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def steps_in(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The notes that tell a loss."""
    return [note for note in notes if "step" in note]


def saved_step(folder: Path) -> int:
    """The global step that the next worker will resume at, at least."""
    tag = latest_tag(folder)
    return int(tag.removeprefix("global_step")) if tag else 0


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Kills and resumes until the time is over; returns both loss curves and what happened.

    Raises:
        AssertionError: a worker failed by itself, or resumed behind a complete checkpoint.
    """
    draw, end = random.Random(seed), time.monotonic() + minutes * 60
    pause = minutes * 60 / 4000
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name, "run"), Path(name, "log")
        kills = 0
        while time.monotonic() < end:
            expected, known = saved_step(folder), len(notes_in(log))
            devices, stage = draw.choice(DEVICES), draw.randrange(STAGES)
            worker = started(devices, folder, log, 10**9, pause, stage, draw.choice(RESTS))
            # A kill tells most once training goes on, but may come before, too.
            early = draw.random() < 0.1
            while not early and worker.poll() is None and not steps_in(notes_in(log)[known:]):
                time.sleep(0.2)
            time.sleep(draw.uniform(0, max(2, minutes)))
            worker.send_signal(signal.SIGKILL)
            assert worker.wait() == -signal.SIGKILL, "a worker failed by itself"
            kills += 1
            for note in notes_in(log)[known:]:
                assert note.get("resumed", expected) >= expected, "it lost a complete checkpoint"
        return compared(Path(name), log, kills)


def compared(folder: Path, log: Path, kills: int) -> dict[str, Any]:
    """What the log says, beside an undisturbed run of as many steps."""
    disturbed = steps_in(notes_in(log))
    reached = max((note["step"] for note in disturbed), default=0)
    alone = folder / "alone"
    assert started(8, folder / "own", alone, reached, 0, 2, "none").wait() == 0
    return {
        "kills": kills,
        "disturbed": disturbed,
        "undisturbed": {note["step"]: note["loss"] for note in steps_in(notes_in(alone))},
    }


def largest_difference(found: dict[str, Any]) -> float:
    """Of a disturbed loss from the undisturbed one of its step, relative to 0.01 at least."""
    alone = found["undisturbed"]
    return max(
        abs(note["loss"] - alone[note["step"]]) / max(alone[note["step"]], 0.01)
        for note in found["disturbed"]
    )


def draw_curves(found: dict[str, Any], file: Path) -> None:
    """The two curves over each other, the disturbed one by its number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    axes.plot(*zip(*found["undisturbed"].items(), strict=True), color="black", label="undisturbed")
    for devices in DEVICES:
        points = [(n["step"], n["loss"]) for n in found["disturbed"] if n["devices"] == devices]
        if points:
            axes.plot(*zip(*points, strict=True), ".", markersize=3, label=f"{devices} devices")
    axes.set(xlabel="step", ylabel="loss", title=f"{found['kills']} faults")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


@pytest.mark.slow
def test_a_run_that_is_killed_and_moved_again_and_again_has_the_losses_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    found = soak(minutes=2, seed=1)
    assert found["kills"] >= 2
    assert found["undisturbed"], "no step was reached"
    assert largest_difference(found) < TOLERANCE
    draw_curves(found, tmp_path / "soak.png")


def report(found: dict[str, Any], plot: Path) -> None:
    """Draws and prints how the run went.

    Raises:
        AssertionError: a loss is not that of the undisturbed run.
    """
    draw_curves(found, plot)
    difference = largest_difference(found)
    print(
        f"{found['kills']} faults, {len(found['undisturbed'])} steps, largest difference of a loss "
        f"{difference:.1e}; {plot}"
    )
    assert difference < TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("out/soak.png"))
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        folder, log, steps, pause, stage, device = given.work
        work(Path(folder), Path(log), int(steps), float(pause), int(stage), device)
        return
    report(soak(given.minutes, given.seed), given.plot)


if __name__ == "__main__":
    main()
