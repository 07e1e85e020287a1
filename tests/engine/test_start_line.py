"""What an engine says before it trains: one line with its batch, and lines around long compiles."""

import io
import logging
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import current
from spmdzero.engine import _programs
from spmdzero.integrations._initialize import initialize_for_client
from tests.support.engines import config

pytestmark = pytest.mark.backends("any")


def starts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines so far that say what is going to happen."""
    return [r.message for r in caplog.records if r.message.startswith("spmdzero ")]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
            "ZeRO-2, bf16, {backend}, 8 CPU devices on 1 host; "
            "16 rows a process = 2 a device, x 1 accumulation = 16 a step",
        ),
        (
            {
                "zero_optimization": {"stage": 1},
                "fp16": {"enabled": True},
                "gradient_accumulation_steps": 3,
            },
            "ZeRO-1, fp16, {backend}, 8 CPU devices on 1 host; "
            "16 rows a process = 2 a device, x 3 accumulation = 48 a step",
        ),
        (
            {
                "zero_optimization": {"stage": 0},
                "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            },
            "stage 0 (no ZeRO), fp32 with autocast to bf16, {backend}, 8 CPU devices on 1 host; "
            "16 rows a process = 2 a device, x 1 accumulation = 16 a step",
        ),
    ],
)
def test_one_line_at_the_start_says_what_is_going_to_happen(
    more: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        for _ in range(2):
            spmdzero.initialize(
                model=nn.Linear(4, 4), config=config(train_micro_batch_size_per_gpu=2, **more)
            )
    said = expected.format(backend={"jax": "JAX"}.get(current().name, current().name))
    # Engines that are alike say it once.
    assert starts(caplog) == [f"spmdzero {version('spmdzero')}: {said}"]


def test_under_a_client_the_line_says_whose_rows_its_batch_size_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = config(train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=2)
    with caplog.at_level(logging.INFO, "spmdzero"):
        initialize_for_client(model=nn.Linear(4, 4), config=told)
    (line,) = starts(caplog)
    assert "; 8 rows a process = 1 a device, x 2 accumulation = 16 a step. " in line
    assert line.endswith(
        "The client's batch size (per_device_train_batch_size, a loader's batch_size) is these "
        "8 rows, which 8 devices share: under DeepSpeed it would be 8 rows on each of 8 GPUs, "
        "128 a step"
    )


def test_keys_without_effect_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    idle = {f"{name}_bucket_size": 5e8 for name in ("reduce", "allgather")}
    idle |= {"overlap_comm": True, "contiguous_gradients": True, "round_robin_gradients": True}
    with caplog.at_level(logging.INFO, "spmdzero"):
        for _ in range(2):
            spmdzero.initialize(
                model=nn.Linear(4, 4), config=config(zero_optimization={"stage": 2, **idle})
            )
    (line,) = [r.message for r in caplog.records if "without effect" in r.message]
    keys = re.fullmatch(r"config keys without effect here: (.*) \(docs/config\.md says why\)", line)
    assert keys is not None, line
    assert {*keys[1].split(", ")} == {f"zero_optimization.{name}" for name in idle}


def test_a_long_compile_is_announced_and_timed_once_for_each_program(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every compile is long.
    monkeypatch.setattr(_programs, "LONG", 0.0)
    engine, *_ = spmdzero.initialize(
        model=nn.Linear(4, 4), config=config(gradient_accumulation_steps=2)
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "spmdzero"):
        for _ in range(2):
            step(engine)
        lines = [r.message for r in caplog.records if r.message.startswith("compil")]
        caplog.clear()
        for _ in range(6):
            step(engine)
    assert lines[0] == (
        "compiling a micro-batch that accumulates, once for each shape of its inputs ..."
    )
    assert re.fullmatch(r"compiled a micro-batch that accumulates in \d+\.\d s", lines[1])
    assert "compiling the step's last micro-batch, once for each shape of its inputs ..." in lines
    assert not caplog.records


def step(engine: spmdzero.Engine) -> None:
    for _ in range(2):
        engine.backward(engine(torch.ones(8, 4)).square().mean())
        engine.step()


def test_a_short_compile_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_programs, "LONG", 3600.0)
    engine, *_ = spmdzero.initialize(model=nn.Linear(4, 4), config=config())
    caplog.clear()
    with caplog.at_level(logging.INFO, "spmdzero"):
        engine.backward(engine(torch.ones(8, 4)).square().mean())
        engine.step()
    assert not [r for r in caplog.records if r.message.startswith("compil")]


def test_a_line_stands_by_itself_beside_a_progress_bar(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tqdm = pytest.importorskip("tqdm")
    logger = logging.getLogger("spmdzero")
    # pytest's handlers are those of a script that configures logging.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (handler,) = [h for h in logger.handlers if type(h).__module__ == "spmdzero._logging"]
    monkeypatch.setattr(handler, "stream", sys.stderr)
    with tqdm.tqdm(total=2, ncols=40) as bar:
        bar.update()
        logger.info("between two steps")
        bar.update()
    lines = re.split(r"[\r\n]", capfd.readouterr().err)
    (line,) = [line for line in lines if "between two steps" in line]
    assert "%|" not in line


def _at(level: int) -> logging.Handler:
    handler = logging.StreamHandler(io.StringIO())
    handler.setLevel(level)
    return handler


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        # ms-swift does so with whatever it finds there.
        (lambda _: _at(logging.ERROR), ["INFO", "WARNING"]),
        (lambda _: _at(logging.WARNING), ["INFO"]),
        (lambda _: logging.NullHandler(), ["INFO", "WARNING"]),
        (lambda path: logging.FileHandler(path / "log", delay=True), ["INFO", "WARNING"]),
        (lambda _: _at(logging.NOTSET), []),
    ],
)
def test_a_line_that_the_roots_handlers_drop_is_on_stderr(
    make: Callable[[Path], logging.Handler],
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger, stream = logging.getLogger("spmdzero"), io.StringIO()
    (handler,) = [h for h in logger.handlers if type(h).__module__ == "spmdzero._logging"]
    monkeypatch.setattr(handler, "stream", stream)
    given = make(tmp_path)
    monkeypatch.setattr(logging.getLogger(), "handlers", [given])
    logger.info("it compiles")
    logger.warning("it was skipped")
    given.close()
    assert re.findall(r"\[(\w+)\] \[spmdzero\]", stream.getvalue()) == shown


def test_lines_are_on_stderr_if_the_root_is_kept_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, stream = logging.getLogger("spmdzero"), io.StringIO()
    (handler,) = [h for h in logger.handlers if type(h).__module__ == "spmdzero._logging"]
    monkeypatch.setattr(handler, "stream", stream)
    monkeypatch.setattr(logger, "propagate", False)
    logger.info("it compiles")
    assert "it compiles" in stream.getvalue()
