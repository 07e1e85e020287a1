"""Monitors, timers and progress lines of one run, beside those of real DeepSpeed."""

import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import spmdzero
from tests.support.contract import make_model
from tests.support.engines import Mean, ask_never, one_call, reads, start
from tests.surface.record_monitor import STEPS, config, train

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "monitor_csv.json").read_text())


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(record.getMessage())


class Run:
    """Four steps of two micro-batches with everything on, and what they left."""

    def __init__(self, folder: Path, lines: list[str]) -> None:
        self.folder, self.lines = folder, lines
        more = {
            "tensorboard": {"enabled": True, "output_path": str(folder / "tb"), "job_name": "job"},
            "steps_per_print": 3,
        }
        engine, *_ = spmdzero.initialize(
            model=make_model(), config=config(folder / "csv", devices=8) | more
        )
        self.losses = train(engine)
        self.timers = engine.get_wall_clock_timers()
        self.rows_before_close = self.rows("Train_Samples_train_loss.csv")
        engine.monitor.write_events([("Mine/accuracy top1", 0.5, 64)])
        engine.monitor.close()

    def rows(self, name: str) -> list[list[str]]:
        text = (self.folder / "csv" / "job" / name).read_bytes().decode()
        return [line.split(",") for line in text.split("\r\n")[:-1]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    logger, lines = logging.getLogger("spmdzero"), Lines()
    logger.addHandler(lines)
    yield Run(tmp_path_factory.mktemp("run"), lines.text)
    logger.removeHandler(lines)


def test_the_lr_file_is_deepspeeds_to_the_byte(run: Run) -> None:
    name = "Train_Samples_lr.csv"
    assert (run.folder / "csv" / "job" / name).read_bytes().decode() == RECORDED["files"][name]


def test_every_file_but_the_loss_and_the_phases_inside_of_the_program_is_deepspeeds(
    run: Run,
) -> None:
    ours = {path.name for path in (run.folder / "csv" / "job").iterdir()}
    theirs = set(RECORDED["files"])
    assert ours - theirs == {"Train_Samples_train_loss.csv", "Mine_accuracy_top1.csv"}
    assert theirs - ours == {
        "Train_Samples_elapsed_time_ms_backward_inner.csv",
        "Train_Samples_elapsed_time_ms_backward_allreduce.csv",
    }


def test_the_loss_file_holds_each_steps_mean_loss_at_deepspeeds_sample_counts(run: Run) -> None:
    header, *rows = run.rows("Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    assert [int(samples) for samples, _ in rows] == [16, 32, 48, 64]
    written = [float(loss) for _, loss in rows]
    assert written == pytest.approx(run.losses, rel=1e-12)
    # fp32 sums in another order, over 8 devices instead of one.
    assert written == pytest.approx(RECORDED["losses"], rel=2e-6)


def test_losses_are_read_at_print_steps_and_when_the_monitor_closes(run: Run) -> None:
    assert len(run.rows_before_close) == 1 + 3
    assert len(run.rows("Train_Samples_train_loss.csv")) == 1 + STEPS


def test_elapsed_times_are_written_at_each_boundary(run: Run) -> None:
    for phase in ("forward", "backward", "step"):
        header, *rows = run.rows(f"Train_Samples_elapsed_time_ms_{phase}.csv")
        assert header == ["step", f"elapsed_time_ms_{phase}"]
        assert [samples for samples, _ in rows] == ["16", "32", "48", "64"]
        assert all(float(elapsed) > 0 for _, elapsed in rows)


def test_tensorboard_holds_the_same_scalars_as_the_csv_files(run: Run) -> None:
    events = EventAccumulator(str(run.folder / "tb" / "job"))
    events.Reload()
    for tag in events.Tags()["scalars"]:
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        _, *rows = run.rows(tag.replace("/", "_").replace(" ", "_") + ".csv")
        # TensorBoard keeps fp32.
        assert found == [(int(step), pytest.approx(float(value), rel=1e-6)) for step, value in rows]
    assert {"Train/Samples/lr", "Train/Samples/train_loss"} <= set(events.Tags()["scalars"])


def test_phase_times_are_logged_after_each_micro_batch_and_each_boundary(run: Run) -> None:
    number = r"\d+\.\d\d"
    micro = rf"\[Rank 0\] time \(ms\) \| fwd_microstep: {number} \| bwd_microstep: {number} "
    boundary = rf"\[Rank 0\] time \(ms\) \| fwd: {number} \| bwd: {number} \| step: {number}"
    times = [line for line in run.lines if "time (ms)" in line]
    shown = ["micro" if re.match(micro, line) else "boundary" for line in times]
    assert shown == ["micro", "micro", "boundary"] * STEPS
    assert all(re.fullmatch(boundary, line) for line in times[2::3])


def test_wall_clock_timers_of_a_step_add_up_its_micro_batches(run: Run) -> None:
    assert set(run.timers) == {
        f"{p}{m}" for p in ("fwd", "bwd", "step") for m in ("", "_microstep")
    }
    assert all(run.timers[phase] > run.timers[f"{phase}_microstep"] for phase in ("fwd", "bwd"))


def test_progress_and_throughput_are_logged_at_print_steps_after_the_first_two(run: Run) -> None:
    progress = [line for line in run.lines if line.startswith("step=")]
    assert progress == ["step=3, skipped=0, lr=[0.0006666666666666666], mom=[(0.9, 0.999)]"]
    (throughput,) = [line for line in run.lines if "SamplesPerSec" in line]
    rate = r"SamplesPerSec=\d+\.\d+"
    assert re.fullmatch(rf"micro_step=6/global_step=3, RunningAvg{rate}, Curr{rate}", throughput)


def test_an_engine_without_wall_clock_breakdown_has_no_timers_and_does_not_wait() -> None:
    engine, *_ = spmdzero.initialize(
        model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1}
    )
    assert type(engine) is spmdzero.Engine
    assert engine.get_wall_clock_timers() == {}
    assert not engine.monitor.enabled


def test_fp16_writes_the_scale_and_a_plain_backward_no_loss(tmp_path: Path) -> None:
    engine, *_ = spmdzero.initialize(
        model=torch.nn.Linear(4, 4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 1},
            "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1},
            "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        },
    )
    for _ in range(3):
        engine.scale(engine(torch.randn(8, 4).half()).square().mean()).backward()
        engine.step()
    engine.monitor.close()
    scales = (tmp_path / "job" / "Train_Samples_loss_scale.csv").read_text().split()
    # It doubles after each step whose distance to the last overflow is positive, so not the first.
    assert scales == ["step,loss_scale", "8,256.0", "16,512.0", "24,1024.0"]
    assert not (tmp_path / "job" / "Train_Samples_train_loss.csv").exists()


def test_log_level_sets_the_level_of_the_projects_logger() -> None:
    logger = logging.getLogger("spmdzero")
    before = logger.level
    try:
        spmdzero.initialize(
            model=torch.nn.Linear(2, 2), config={"train_batch_size": 8, "log_level": "ERROR"}
        )
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


def test_why_a_key_has_no_effect_is_said_at_the_level_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    with caplog.at_level("DEBUG", "spmdzero"):
        engine, *_ = spmdzero.initialize(
            model=torch.nn.Linear(4, 4),
            config={"train_batch_size": 8, "zero_optimization": zero},
        )
    named = [r.message for r in caplog.records if r.levelname == "DEBUG"]
    assert any(name.startswith("zero_optimization.overlap_comm has no effect") for name in named)
    # As below stage 3 of DeepSpeed, where the optimizer has no such cache.
    assert engine.empty_partition_cache() is None


def test_a_monitor_reads_nothing_between_print_steps_and_knows_the_lr_of_skipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_never(monkeypatch)
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}}
    more: dict[str, Any] = {"scheduler": schedule, "bf16": {"enabled": True}}
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    watched = start(Mean(), csv_monitor=section, steps_per_print=6, **more)
    asked = start(Mean(), **more)
    expected = []
    for step in range(12):
        rows = torch.full((8, 4), math.inf if step in (2, 3, 8) else 1.0, dtype=torch.bfloat16)
        one_call(asked, rows)
        expected.append(asked.get_lr()[0])
        before = reads()
        one_call(watched, rows)
        # Three steps are compared before they are captured, which reads.
        if step in (4, 7, 8, 9, 10):
            assert reads() == before
    watched.monitor.close()
    _, *rows = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert [float(row.split(",")[1]) for row in rows] == expected
    assert len({*expected}) == 12 - 3
