"""What `initialize` and the first step compile, what they report of it, and the cache on disk."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend.torch_xla import DeviceMesh, counters
from tests.support.processes import environment
from tests.support.trajectory import ROOT


def config(gas: int = 1, **spmd: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "spmd": spmd,
    }


def train(engine: spmdzero.Engine) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(8, 72)).pow(2).mean())
        engine.step()


def test_compile_seconds_are_reported_by_program(mesh: DeviceMesh) -> None:
    before = counters.compile_seconds()
    engine, *_ = spmdzero.initialize(model=nn.Linear(72, 72), config=config(gas=2))
    train(engine)
    spent = {c.kind: c.seconds for c in engine.programs.compilations}
    assert spent.keys() == {"folded micro", "folded boundary"}
    assert all(seconds > 0 for seconds in spent.values())
    assert engine.programs.initial.count == 1
    total = sum(spent.values()) + engine.programs.initial.seconds
    assert total == pytest.approx(counters.compile_seconds() - before)
    (check,) = engine.doctor().of("compilations")
    assert "initial states 0." in check.said
    shown = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in spent.items())
    assert shown in check.said


def test_more_layers_are_no_more_programs(mesh: DeviceMesh) -> None:
    compiled = []
    for layers in (2, 12):
        model = nn.Sequential(*(nn.Linear(72, 72) for _ in range(layers)))
        engine, *_ = spmdzero.initialize(model=model, config=config())
        train(engine)
        made = [(c.kind, c.count) for c in engine.programs.compilations]
        compiled.append((engine.programs.initial.count, made))
    assert compiled[0] == compiled[1] == (1, [("folded boundary", 1)])


def test_a_second_engine_of_the_same_model_compiles_nothing(mesh: DeviceMesh) -> None:
    for _ in range(2):
        engine, *_ = spmdzero.initialize(model=nn.Linear(72, 56), config=config())
        train(engine)
    assert engine.programs.initial.count == 0
    assert list(engine.programs.compilations) == []


def test_on_the_cpu_a_cache_is_declined_once_with_the_reason(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        for _ in range(2):
            spmdzero.initialize(
                model=nn.Linear(4, 4), config=config(compile_cache=str(tmp_path / "cache"))
            )
    said = [line for line in caplog.messages if "compile_cache" in line]
    assert len(said) == 1
    assert "no effect on the CPU: torch_xla can't read compiled CPU programs back" in said[0]
    assert not (tmp_path / "cache").exists()


# Choosing the cache starts no device, so that a machine without a TPU can say that it has one.
ON_TPU = """
import os
from spmdzero.backend.torch_xla import compile_cache
compile_cache.use("/cache")
compile_cache.use("/cache")
print(os.environ["XLA_PERSISTENT_CACHE_PATH"])
"""
TOO_LATE = """
import os, torch
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.backend.torch_xla import compile_cache, runtime
runtime.start()
(torch.ones(2, device=runtime.device()) + 1).cpu()
os.environ["PJRT_DEVICE"] = "TPU"
try:
    compile_cache.use("/cache")
except SpmdZeroRuntimeError as error:
    print(error)
"""


def run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(**variables),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_a_tpu_keeps_its_programs_in_the_folder() -> None:
    assert run(ON_TPU, PJRT_DEVICE="TPU") == "/cache"


def test_a_cache_that_comes_after_the_first_compilation_is_refused() -> None:
    said = run(TOO_LATE, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1")
    assert "comes too late" in said
    assert "XLA_PERSISTENT_CACHE_PATH='/cache'" in said
