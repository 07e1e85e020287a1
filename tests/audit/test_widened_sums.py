"""Sums that XLA's CPU compiler made wide by itself are none of the program's.

The texts are what jax 0.12.0.1 compiled of stage 2 of a Linear in bf16 with SGD on two devices,
without layouts and source lines; the second with `"communication_data_type": "fp32"`. Its weight
is sharded. Its bias is whole, and its sum went together with sums of fp32, under their name.
"""

import pytest

from spmdzero.audit._collectives import ReadProgram
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

DTYPES = {"one.weight": "bfloat16", "one.bias": "bfloat16"}


def found(text: str, communicate: str | None = None) -> list[tuple[str, str]]:
    """Name and subject of each finding."""
    program = ReadProgram((ROOT / f"tests/data/hlo/jax_0_12_cpu_{text}_sums.txt").read_text())
    sums = {c.tensor: c.dtype for c in program.ledger.collectives if c.role == "gradient"}
    assert sums == dict.fromkeys(DTYPES, "f32")
    findings = program.findings(dtypes=DTYPES, where="program", communicate=communicate)
    return [(finding.name, finding.subject) for finding in findings]


def test_a_bf16_sum_that_was_widened_and_is_narrowed_again_is_not_reported() -> None:
    assert found("bf16") == []


@pytest.mark.parametrize("communicate", [None, "fp32"])
def test_a_sum_of_fp32_is_reported(communicate: str | None) -> None:
    # Without the config's word the bias's sum, narrowed at once, could be the compiler's.
    subject = "one.weight" if communicate is None else "one.bias, one.weight"
    assert found("fp32", communicate) == [("wide-dtype", subject)]
