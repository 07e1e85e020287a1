"""What XLA's CPU compiler makes of matrix products is what torch computes, in each run."""

import json
import logging
import os

import pytest

from spmdzero.xla import runtime
from tests.support.processes import run_module, run_python


def test_repeated_steps_are_torchs_on_every_processor() -> None:
    # With XNNPACK they were wrong on an AMD EPYC of family 25, by a hundredth in the third step.
    apart = json.loads(run_module("tests.engine.matrix_products", devices=2, XLA_FLAGS=""))
    # fp32 in another order of summation, over three steps: 7e-7 was seen.
    assert all(difference < 1e-5 for difference in apart)


FLAGS = "import os, spmdzero; print(os.environ['XLA_FLAGS'])"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("", "--xla_cpu_use_xnnpack=false"),
        ("--xla_cpu_use_xnnpack=true", "--xla_cpu_use_xnnpack=true"),
    ],
)
def test_xnnpack_is_off_unless_the_user_says_otherwise(given: str, used: str) -> None:
    given = f"{given} --xla_backend_optimization_level=0".strip()
    flags = run_python("-c", FLAGS, devices=1, XLA_FLAGS=given).splitlines()[-1].split()
    assert [flag for flag in flags if "xnnpack" in flag] == [used]
    assert set(given.split()) <= set(flags)


def test_started_too_late_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.start()
    assert runtime.device_count() > 0
    assert "--xla_cpu_use_xnnpack=false" in os.environ["XLA_FLAGS"].split()
    monkeypatch.setenv("XLA_FLAGS", "")
    with caplog.at_level(logging.WARNING, "spmdzero"):
        runtime.start()
    assert "set XLA_FLAGS=--xla_cpu_use_xnnpack=false" in caplog.text
    assert os.environ["XLA_FLAGS"] == ""
