"""Weights that are tied stay so when Lightning takes its module from the devices."""

import pytest

from tests.support.processes import run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")


@pytest.mark.slow
def test_tied_weights_are_tied_after_fit_and_in_the_next() -> None:
    printed = run_python(
        "-m", "tests.integrations.lightning_tied", devices=8, USE_TORCH_XLA="false"
    )
    lines = [line for line in printed.splitlines() if line.startswith("fit ")]
    assert lines == ["fit True cpu"] * 2
