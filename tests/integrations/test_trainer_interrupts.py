"""Ctrl-C in Trainer's loop: it ends, and its engine goes on, saves and loads."""

from pathlib import Path

import pytest

from tests.integrations.test_transformers import run

pytestmark = [pytest.mark.backends("any"), pytest.mark.slow]


def test_an_interrupted_trainer_leaves_an_engine_that_goes_on_and_saves(tmp_path: Path) -> None:
    found = run("spmdzero", tmp_path, "interrupted")["interrupted"]
    assert "error" not in found, found["error"]
    for at, one in enumerate(found["runs"]):
        assert one["raised"], at
        # It is that of the steps that were made, none of them in part.
        assert one["weights"] == found["whole"][str(one["steps"])], at
        assert one["after loading"] == one["weights"], at
        assert one["went on"] == one["went on again"] != one["weights"], at
