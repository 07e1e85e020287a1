"""The soak in short; `make soak` runs it for 30 minutes."""

from pathlib import Path

import pytest

from tests.checkpoint.soak import TOLERANCE, draw_curves, largest_difference, soak


@pytest.mark.slow
def test_a_run_that_is_killed_and_moved_again_and_again_has_the_losses_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    found = soak(minutes=2, seed=1)
    assert found["kills"] >= 2
    assert found["undisturbed"], "no step was reached"
    assert largest_difference(found) < TOLERANCE
    draw_curves(found, tmp_path / "soak.png")
