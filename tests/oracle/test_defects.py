"""The differences that docs/coming_from_deepspeed.md gives in numbers, measured again."""

import re
from pathlib import Path

import pytest

from tests.oracle.defects import compare

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_deepspeed.md"


def table() -> dict[str, list[str]]:
    section = PAGE.read_text().split("### DeepSpeed's defects, in numbers")[1].split("\n#")[0]
    rows = re.findall(r"^\| (.+) \| (\S+) \| (\S+) \|$", section, re.MULTILINE)
    return {name: [theirs, ours] for name, theirs, ours in rows[1:]}


@pytest.mark.slow
def test_the_defects_on_the_page_are_those_of_live_deepspeed_and_not_ours() -> None:
    measured, written = compare(), table()
    assert written.keys() == measured.keys(), "run python -m tests.oracle.defects"
    for name, values in measured.items():
        for value, cell in zip(values, written[name], strict=True):
            if isinstance(value, str):
                assert cell == value, name
            else:
                # Three digits are written; 16-bit formats differ in the third between CPUs.
                assert float(cell) == pytest.approx(value, rel=0.02), name
