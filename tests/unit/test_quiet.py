"""Of what C++ prints, what nobody asked for is left out, also where threads have torn it."""

import os

import pytest

from spmdzero.backend._quiet import without_gloos_lines

pytestmark = pytest.mark.backends("any")


def test_gloos_lines_are_left_out_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with without_gloos_lines():
        for text in (
            "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ",
            "ranks is : 1\n",
            "rows read\n[Gloo] Rank [Gloo] Rank 2 is connected to 3 peer ranks. Expected number ",
            "of connected peer ranks is : 3\n1 is connected to 3 peer ranks. Expected number of ",
            "connected peer ranks is : 3\n12\nstep 1: [Gloo] Rank 4 is connected to nobody\n",
        ):
            os.write(1, text.encode())
        with without_gloos_lines():
            os.write(1, b"within\n")
        os.write(
            1, b"[Gloo] Rank 31 is connected to  is connected to 33 peer ranks.  peer ranks. \n"
        )
        os.write(1, b"end")
    os.write(1, b" and after\n")
    expected = (
        "rows read\n12\nstep 1: [Gloo] Rank 4 is connected to nobody\nwithin\nend and after\n"
    )
    assert capfd.readouterr().out == expected
