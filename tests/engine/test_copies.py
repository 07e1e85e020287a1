"""The compiled step writes the new state over the old one, without a copy in between."""

import json
from pathlib import Path

import pytest

from tests.support.processes import run_module

pytestmark = [pytest.mark.backends("torch_xla", test_all="jax"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("style", "precision"), [("captured", "fp32"), ("captured", "bf16"), ("three calls", "fp32")]
)
def test_no_state_is_copied(style: str, precision: str, tmp_path: Path) -> None:
    arguments = (style, str(tmp_path), precision)
    flags = f"--xla_dump_to={tmp_path}"
    printed = run_module("tests.engine.copies", *arguments, devices=2, XLA_FLAGS=flags)
    shapes = json.loads(printed.splitlines()[-1])
    # Of vectors, which are as long as others of another role, a few are.
    assert [shape for shape in shapes if "," in shape] == []
