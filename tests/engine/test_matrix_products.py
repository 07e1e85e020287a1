"""What XLA's CPU compiler makes of matrix products is what torch computes, in each run."""

import json
import logging
import os

import pytest

from spmdzero.backend.torch_xla import DeviceMesh, _cpu_flags, runtime
from tests.support.processes import run_module

pytestmark = pytest.mark.backends("torch_xla")


@pytest.mark.slow
def test_repeated_steps_are_torchs_on_every_processor() -> None:
    # With XNNPACK they were wrong on an AMD EPYC of family 25, by a hundredth in the third step.
    apart = json.loads(run_module("tests.engine.matrix_products", devices=2, XLA_FLAGS=""))
    # fp32 in another order of summation, over three steps: 7e-7 was seen.
    assert all(difference < 1e-5 for difference in apart)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", ["xla_cpu_use_xnnpack", "xla_cpu_enable_fast_min_max"]),
        ("--xla_dump_to=a", ["xla_cpu_use_xnnpack", "xla_cpu_enable_fast_min_max"]),
        ("--xla_cpu_use_xnnpack=true", ["xla_cpu_enable_fast_min_max"]),
        ("--xla_cpu_use_xnnpack=true --xla_cpu_enable_fast_min_max=true", []),
    ],
)
def test_a_flag_is_added_unless_the_user_says_something_of_it(given: str, added: list[str]) -> None:
    assert _cpu_flags.left_open(given) == added


def test_started_too_late_it_says_so(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert "--xla_cpu_use_xnnpack=false" in runtime.cpu_flags()
    # As if the script had switched SPMD on and used a device by itself.
    monkeypatch.setattr(_cpu_flags, "_started_with", None)
    monkeypatch.setenv("XLA_FLAGS", "")
    with caplog.at_level(logging.WARNING, "spmdzero"):
        runtime.start()
    flags = "--xla_cpu_use_xnnpack=false --xla_cpu_enable_fast_min_max=false"
    assert f"set XLA_FLAGS='{flags}'" in caplog.text
    assert os.environ["XLA_FLAGS"] == ""
