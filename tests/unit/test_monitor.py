"""Monitors write what they are given, in order, once each, and say which package they lack."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from spmdzero.config import load_config
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.monitor import MonitorMaster
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("any")


def master(folder: Path, *, writes: bool = True, **section: Any) -> MonitorMaster:
    csv = {"enabled": True, "output_path": str(folder), "job_name": "job"} | section
    config = load_config({"train_micro_batch_size_per_gpu": 1, "csv_monitor": csv})
    return MonitorMaster(config, writes=writes)


def test_a_continued_run_appends_below_one_header(tmp_path: Path) -> None:
    for samples in (8, 16):
        monitor = master(tmp_path)
        monitor.write_events([("Train/Samples/lr", 0.5, samples)])
        monitor.close()
    text = (tmp_path / "job" / "Train_Samples_lr.csv").read_bytes()
    assert text == b"step,lr\r\n8,0.5\r\n16,0.5\r\n"


def test_an_event_that_must_be_read_is_held_and_later_events_stay_behind_it(
    tmp_path: Path,
) -> None:
    monitor, reads = master(tmp_path), []

    def read() -> float:
        reads.append(True)
        return 2.0

    monitor.write_events([("loss", read, 8)])
    monitor.write_events([("loss", 1.0, 16)])
    assert not reads
    assert not list((tmp_path / "job").iterdir())
    monitor.flush()
    assert (tmp_path / "job" / "loss.csv").read_text().split() == ["step,loss", "8,2.0", "16,1.0"]
    monitor.write_events([("loss", 0.5, 24)])
    assert (tmp_path / "job" / "loss.csv").read_text().split()[-1] == "24,0.5"
    assert len(reads) == 1


def test_nothing_is_made_where_no_monitor_is_on_or_another_process_writes(tmp_path: Path) -> None:
    assert not master(tmp_path, enabled=False).enabled
    silent = master(tmp_path, writes=False)
    silent.write_events([("loss", 1.0, 8)])
    silent.close()
    assert not list(tmp_path.iterdir())


def test_the_end_of_the_process_writes_what_is_held(tmp_path: Path) -> None:
    run_python(
        *("-W", "error", "-c"),
        "import sys\n"
        "from spmdzero.config import load_config\n"
        "from spmdzero.monitor import MonitorMaster\n"
        "csv = {'enabled': True, 'output_path': sys.argv[1], 'job_name': 'job'}\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'csv_monitor': csv}\n"
        "monitor = MonitorMaster(load_config(config))\n"
        "monitor.write_events([('loss', lambda: 2.0, 8)])\n",
        str(tmp_path),
    )
    assert (tmp_path / "job" / "loss.csv").read_text().split() == ["step,loss", "8,2.0"]


# Its threads and telemetry stay out of the other tests' process; it deprecates what it uses itself.
WANDB = """
import json, sys, warnings
warnings.simplefilter("ignore")
from spmdzero.config import load_config
from spmdzero.monitor import MonitorMaster
import wandb
config = {
    "train_micro_batch_size_per_gpu": 1,
    "wandb": {"enabled": True, "project": "fish", "group": "red", "team": "sea"},
}
monitor = MonitorMaster(load_config(config))
lr = "Train/Samples/lr"
monitor.write_events([(lr, 0.5, 8), (lr, 0.25, 16), (lr, 0.125, 24)])
run = wandb.run
# wandb keeps a step open until the next one begins.
seen = [run.project, run.group, run.entity, run.summary[lr], run.step]
monitor.close()
open(sys.argv[1] + "/seen.json", "w").write(json.dumps(seen))
assert wandb.run is None
"""


def test_wandb_logs_to_the_configs_project_at_sample_counts(tmp_path: Path) -> None:
    run_python(
        *("-W", "error", "-c", WANDB, str(tmp_path)),
        WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true",
    )  # fmt: skip
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == ["fish", "red", "sea", 0.25, 24]


def test_comet_gets_a_scalar_again_after_its_interval_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []

    class Experiment:
        def set_name(self, name: str) -> None:
            said.append(name)

        def log_metric(self, name: str, value: float, *, step: int) -> None:
            said.append((name, value, step))

        def end(self) -> None:
            said.append("end")

    def start(**asked: Any) -> Experiment:
        said.append({key: value for key, value in asked.items() if value is not None})
        return Experiment()

    # The package is no requirement of the tests.
    comet = types.ModuleType("comet_ml")
    comet.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    section = {"enabled": True, "project": "fish", "experiment_name": "red", "mode": "create"}
    config = {"train_micro_batch_size_per_gpu": 1, "comet": section | {"samples_log_interval": 16}}
    monitor = MonitorMaster(load_config(config))
    monitor.write_events([("lr", 0.5, 8), ("lr", 0.25, 16), ("loss", 2.0, 16), ("lr", 0.125, 24)])
    monitor.close()
    asked = {"project": "fish", "mode": "create"}
    assert said == [asked, "red", ("lr", 0.5, 8), ("loss", 2.0, 16), ("lr", 0.125, 24), "end"]


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    packages = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
    for section, package in packages.items():
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        config = load_config({"train_micro_batch_size_per_gpu": 1, section: {"enabled": True}})
        with pytest.raises(SpmdZeroConfigError, match=rf"spmdzero\[{section}\]"):
            MonitorMaster(config)
