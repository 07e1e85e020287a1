"""What `initialize` and the first step compile, what they report of it, and the cache on disk."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import Mesh, counters, current, runtime
from tests.support.engines import start
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

# torch_xla's backend folds no call.
FOLDED = "" if current().compiler is None else "captured "


def trained(model: nn.Module, *, gas: int = 1) -> spmdzero.Engine:
    """After one step."""
    engine = start(model, gradient_accumulation_steps=gas)
    for _ in range(gas):
        engine.backward(engine(torch.ones(8, 72)).pow(2).mean())
        engine.step()
    return engine


def test_compile_seconds_are_reported_by_program(mesh: Mesh) -> None:
    before = counters.compiled()[1]
    engine = trained(nn.Linear(72, 72), gas=2)
    spent = {c.kind: c.seconds for c in engine.programs.compilations}
    assert spent.keys() == {f"{FOLDED}micro", f"{FOLDED}boundary"}
    assert all(seconds > 0 for seconds in spent.values())
    assert engine.programs.initial.count == 1
    total = sum(spent.values()) + engine.programs.initial.seconds
    assert total == pytest.approx(counters.compiled()[1] - before)
    (check,) = engine.doctor().of("compilations")
    assert "initial states 0." in check.said
    shown = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in spent.items())
    assert shown in check.said


def test_more_layers_are_no_more_programs(mesh: Mesh) -> None:
    compiled = []
    for layers in (2, 12):
        model = nn.Sequential(*(nn.Linear(72, 72) for _ in range(layers)))
        engine = trained(model)
        made = [(c.kind, c.count) for c in engine.programs.compilations]
        compiled.append((engine.programs.initial.count, made))
    assert compiled[0] == compiled[1] == (1, [(f"{FOLDED}boundary", 1)])


def test_a_second_engine_of_the_same_model_compiles_nothing(mesh: Mesh) -> None:
    for _ in range(2):
        engine = trained(nn.Linear(72, 56))
    assert engine.programs.initial.count == 0
    assert list(engine.programs.compilations) == []


@pytest.mark.backends("torch_xla")
def test_on_the_cpu_a_cache_is_declined_once_with_the_reason(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        for _ in range(2):
            start(nn.Linear(4, 4), spmd={"compile_cache": str(tmp_path / "cache")})
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


@pytest.mark.slow
@pytest.mark.backends("torch_xla")
def test_a_tpu_keeps_its_programs_in_the_folder() -> None:
    assert run_python("-c", ON_TPU, PJRT_DEVICE="TPU").splitlines()[-1] == "/cache"


@pytest.mark.backends("torch_xla")
def test_a_cache_that_comes_after_the_first_compilation_is_refused(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmdzero.backend.torch_xla import compile_cache

    (torch.ones(2, device=runtime.device()) + 1).cpu()
    # Only what decides for TPU is said to be one.
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    refused = r"comes too late.*XLA_PERSISTENT_CACHE_PATH='/cache'"
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match=refused):
        compile_cache.use("/cache")
